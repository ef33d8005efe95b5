"""How models of ``transformers`` call our attention; unknown arguments are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.mask_request import MaskRequest, describe_mask, probed_attention
from ostinato.runner.attention.registration import paged_attention

QUERY, KEY, VALUE = torch.ones(1, 4, 5, 16), torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 8)


class Listener:
    """Stands where a step is, and remembers what it was asked."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        self.layer, self.style = layer, style
        self.shapes = [tuple(t.shape) for t in (queries, keys, values)]
        return torch.zeros(5, 4, 8)


def module(**attributes: Any) -> Any:
    """An attention module as models have them."""
    return SimpleNamespace(layer_idx=3, **attributes)


def call(module: Any, function: Any = paged_attention, mask: Any = None, **keywords: Any) -> Any:
    listener = Listener()
    keywords.setdefault("ostinato_step", listener)
    output, weights = function(module, QUERY, KEY, VALUE, mask, **keywords)
    assert output.shape == (1, 5, 4, 8) and weights is None
    return listener


def test_heads_become_rows_and_the_layer_is_named():
    heard = call(module(), scaling=0.5)

    assert heard.layer == 3
    assert heard.shapes == [(5, 4, 16), (5, 2, 16), (5, 2, 8)]
    assert heard.style == AttentionStyle(scale=0.5)


def test_without_a_scale_it_is_that_of_the_paper():
    assert call(module()).style.scale == 0.25


def test_windows_caps_and_sinks_are_handed_on():
    sinks = torch.zeros(4)

    style = call(module(), sliding_window=7, softcap=30.0, s_aux=sinks).style

    assert (style.window, style.soft_cap) == (7, 30.0) and style.sinks is sinks
    assert not style.plain


def test_keywords_that_are_off_and_positions_are_no_reason_to_refuse():
    call(
        module(),
        dropout=0.0,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        output_attentions=False,
        position_bias=None,
        position_ids=torch.zeros(1, 5),
        is_causal=True,
    )


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"indices": torch.zeros(1)}, "'indices'"),
        ({"cache": object()}, "'cache'"),
        ({"output_attentions": True}, "'output_attentions'"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "later tokens"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "its own attention mask"),
        ({"ostinato_step": None}, "is not handed the keywords"),
    ],
)
def test_what_we_do_not_know_is_refused_by_name(keywords: dict[str, Any], said: str):
    with pytest.raises(UnsupportedModel, match=said):
        call(module(), **keywords)


def test_a_module_that_is_not_causal_is_refused_unless_the_call_says_otherwise():
    with pytest.raises(UnsupportedModel, match="later tokens"):
        call(module(is_causal=False))

    call(module(is_causal=False), is_causal=True)


def test_a_module_that_does_not_know_its_layer_is_refused():
    with pytest.raises(UnsupportedModel, match="its layer"):
        call(nn.Identity())


def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def window_of_4096(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return causal(batch, head, query, key) & (key > query - 4096)


def chunks_of_4096(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return causal(batch, head, query, key) & (key // 4096 == query // 4096)


def everything(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


def of_this_prompt(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.zeros(1, 24)[0, query] == torch.zeros(1, 24)[0, key]


@pytest.mark.parametrize(
    ("function", "local_size", "request_"),
    [
        (causal, None, MaskRequest(None, True)),
        (window_of_4096, 4096, MaskRequest(4096, True)),
        (window_of_4096, 4095, MaskRequest(4095, False)),
        (window_of_4096, None, MaskRequest(None, False)),
        (chunks_of_4096, 4096, MaskRequest(4096, False)),
        (everything, None, MaskRequest(None, False)),
        (of_this_prompt, None, MaskRequest(None, False)),
    ],
)
def test_a_mask_is_understood_far_beyond_the_prompt(function, local_size, request_):
    """The probe's prompt is 24 tokens; windows of real models are thousands."""
    assert describe_mask(mask_function=function, local_size=local_size) == request_


def test_a_layer_whose_window_is_not_that_of_its_mask_is_refused():
    """Unless the window is as long as the model's positions, and hides nothing."""
    call(module(), probed_attention, MaskRequest(8, True), sliding_window=8)
    call(module(), probed_attention, MaskRequest(None, True), sliding_window=None)

    config = SimpleNamespace(max_position_embeddings=8)
    call(module(config=config), probed_attention, MaskRequest(8, True))
    with pytest.raises(UnsupportedModel, match=r"window of 8 tokens, but .* window of None"):
        call(module(), probed_attention, MaskRequest(8, True))
    with pytest.raises(UnsupportedModel, match=r"neither causal nor .* \(chunks of 8\)"):
        call(module(), probed_attention, MaskRequest(8, False), sliding_window=8)

"""Checks the model's own mask against its layers' windows.

Models define masks as functions of positions. No mask is built here; but while a model is probed,
the function is evaluated at positions far beyond the probe's prompt, and compared with the window
that the layer passes to its attention. So a window of 4,096 is checked with a prompt of 24 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.registration import paged_attention

PROBE_NAME = "ostinato_probe"
"""The attention implementation during the probe, for which models request masks."""

_FAR = 5000
"""A position beyond any window."""


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """A mask that a model requested.

    Attributes:
        window: Positions that a query sees; None sees all up to itself.
        known: Whether it is only causal, with that window.
    """

    window: int | None
    known: bool

    def __getattr__(self, name: str) -> Any:
        """Refuse models that compute with the mask."""
        if name.startswith("__"):  # Python itself, or an inspection tool
            raise AttributeError(name)
        raise UnsupportedModel(
            f"the model works on its attention mask itself (mask.{name}) before attention sees "
            "it: which tokens are seen then does not follow from positions alone"
        )


def register_probe() -> None:
    """Register the probe's attention with ``transformers``; idempotent."""
    transformers.AttentionInterface.register(PROBE_NAME, probed_attention)
    transformers.AttentionMaskInterface.register(PROBE_NAME, describe_mask)


def describe_mask(
    *_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any
) -> MaskRequest:
    """Evaluate a mask function without building the mask.

    Args:
        mask_function: From index tensors of batch, head, query and key to a bool tensor.
        local_size: The model's window or chunk.
    """
    reach = local_size or _FAR
    marks = {0, 1, 7, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 5}
    near = {mark + step for mark in marks for step in (-reach - 1, -reach, -reach + 1, -1, 0, 1)}
    positions = torch.tensor(sorted(p for p in marks | near if p >= 0))
    queries, keys = positions[:, None], positions[None, :]
    expected = keys <= queries
    if local_size is not None:
        expected = expected & (keys > queries - local_size)
    zero = torch.tensor(0)
    try:
        seen = torch.as_tensor(mask_function(zero, zero, queries, keys))
    except (IndexError, RuntimeError, TypeError):  # it depends on the prompt itself
        return MaskRequest(local_size, known=False)
    return MaskRequest(local_size, known=bool((seen.expand_as(expected) == expected).all()))


def probed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRequest | Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend like ``paged_attention``, after comparing the layer's mask with its keywords.

    Raises:
        UnsupportedModel: The mask is of an unknown kind, or its window is not the layer's.
    """
    if isinstance(attention_mask, MaskRequest):
        _check_request(module, attention_mask, keywords.get("sliding_window"))
        attention_mask = None
    return paged_attention(module, query, key, value, attention_mask, **keywords)


def _check_request(module: nn.Module, request: MaskRequest, window: int | None) -> None:
    name = type(module).__name__
    if not request.known:
        raise UnsupportedModel(
            f"{name} asks for a mask that is neither causal nor a sliding window"
            + (f" (chunks of {request.window})" if request.window else "")
        )
    if _effective(request.window, module) != _effective(window, module):
        raise UnsupportedModel(
            f"{name} asks for a mask with a window of {request.window} tokens, but tells its "
            f"attention a window of {window}"
        )


def _effective(window: int | None, module: nn.Module) -> int | None:
    """Return a window if it is smaller than the model's context, else None."""
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return None if not window or (positions is not None and window >= positions) else window

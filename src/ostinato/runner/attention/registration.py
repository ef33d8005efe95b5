"""Registers attention with the models of ``transformers``.

With ``AttentionInterface`` a model's layers call any function that is registered by name. Ours
takes the step as a keyword, which models pass to every layer, and refuses unknown arguments: a bias
that is silently ignored gives fluent, wrong text.
"""

from typing import Any, Protocol

import transformers
from torch import Tensor, nn

from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.states.step import LayerStates

ATTENTION_NAME = "ostinato"
"""The name to load models with: ``attn_implementation="ostinato"``."""

STEP_KEYWORD = "ostinato_step"
"""The keyword of a model call that carries the ``LayerAttention``."""

_HARMLESS = frozenset({"position_ids", "cache_position"})
"""Keywords of some models that have no effect: positions are already in the keys."""


class StepNotReceived(UnsupportedModel):
    """A layer called its attention without the keyword that carries the step."""


class LayerAttention(Protocol):
    """The value of the keyword: a ``GroupedStep``, or a recorder of the calls."""

    @property
    def states(self) -> LayerStates | None:
        """Computes layers with a state; None if there are none."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend in one layer; shapes as in ``AttentionStep.attend``."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ostinato_step: LayerAttention | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend over the block tables of a step; called by a model's layer.

    Args:
        module: The layer's attention module; ``layer_idx`` is the index of the layer.
        query: Shape (1, num_heads, num_tokens, key_dim).
        key: Shape (1, num_kv_heads, num_tokens, key_dim).
        value: Shape (1, num_kv_heads, num_tokens, value_dim).
        attention_mask: Always None: block tables define visibility.
        scaling: Factor on scores; None is ``key_dim ** -0.5``.
        dropout: Always 0.
        is_causal: Overrides the module's own attribute of this name.
        sliding_window: Positions that a query sees; None or 0 sees all before it.
        softcap: Soft cap of scores; None is off.
        s_aux: Attention sinks, shape (num_heads,); None is off.
        ostinato_step: The step.
        others: Anything else; None and False mean "off".

    Returns:
        Shape (1, num_tokens, num_heads, value_dim), and None for the weights.

    Raises:
        UnsupportedModel: The layer requests something unsupported.
        StepNotReceived: There is no step.

    Effects: writes the step's keys and values, and runs its copies, in this layer.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_unknown(module, causal, dropout, attention_mask, others)
    if ostinato_step is None:
        raise StepNotReceived(
            f"{type(module).__name__} is not handed the keywords of the model call and takes none "
            "itself, so it cannot be told where keys and values are"
        )
    style = AttentionStyle(
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        soft_cap=softcap,
        sinks=s_aux,
    )
    attended = ostinato_step.attend(
        layer_index(module), _rows(query), _rows(key), _rows(value), style
    )
    return attended[None], None


def layer_index(module: nn.Module) -> int:
    """Return which layer an attention module belongs to.

    Raises:
        UnsupportedModel: It has no ``layer_idx``.
    """
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedModel(
            f"{type(module).__name__} does not have its layer's index (layer_idx={index!r})"
        )
    return index


def register() -> None:
    """Register our function with ``transformers``; idempotent.

    The mask function returns None, so that models build no mask.
    """
    transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)
    transformers.AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    return None


def _rows(heads: Tensor) -> Tensor:
    """Turn (1, heads, num_tokens, dim) into (num_tokens, heads, dim), without a copy."""
    assert heads.shape[0] == 1, "a step is one row"
    return heads[0].transpose(0, 1)


def _refuse_unknown(
    module: nn.Module,
    causal: bool,
    dropout: float,
    attention_mask: Tensor | None,
    others: dict[str, Any],
) -> None:
    """Raise UnsupportedModel for the first unsupported argument."""
    name = type(module).__name__
    if not causal:
        raise UnsupportedModel(f"{name} attends to later tokens too; only causal attention caches")
    if dropout:
        raise UnsupportedModel(f"{name} uses dropout={dropout} in inference")
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} passes its own attention mask")
    for keyword, value in others.items():
        if value is not None and value is not False and keyword not in _HARMLESS:
            raise UnsupportedModel(
                f"{name} passes {keyword!r} to its attention, which Ostinato does not support"
            )

"""Compares a model with its own attention before it is served.

What a model's config says and what its code does are two things. So each model answers a
short random prompt twice before it is served: once with the attention that it came with, once
through a small KV store, in chunks, in scattered blocks, beside a stranger::

    its own       [0 ................................ 24)     one call, dense
    ours          [0 .... 9) [9 ......... 21) 21  22  23      a stranger's tokens in each call

A layer that keeps a state of its own of which we do not know, looks across the row, or never asks
us, cannot pass. What the two may differ by is what rounding explains, row by row, measured on the
model itself.
Cost: nine calls of the model with a few dozen tokens each.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.backend import AttentionBackend, AttentionStyle, GroupedStep
from ostinato.runner.attention.choice import AttentionCase, choose_attention
from ostinato.runner.attention.mask_request import PROBE_NAME, register_probe
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.registration import (
    ATTENTION_NAME,
    LayerAttention,
    StepNotReceived,
)
from ostinato.runner.inputs import Ints, build_inputs
from ostinato.runner.kv_store import KVSpec, KVStore, LayerKV
from ostinato.runner.layer_groups import one_group
from ostinato.runner.model_call import ModelCall
from ostinato.runner.native.store import TOKEN_GROUP
from ostinato.runner.rounding import in_roundings, rounding_noise
from ostinato.runner.row_watch import RowWatch
from ostinato.runner.settings import AttentionName
from ostinato.runner.states.step import StateRecorder, StateStep
from ostinato.runner.states.store import StateSpec, StateStore

_CHUNKS = (9, 12, 1, 1, 1)
_NUM_TOKENS = sum(_CHUNKS)
_BLOCK_SIZE = 4
_MOST_ROUNDINGS = 4.0
"""Largest difference of logits, in multiples of what rounding was seen to do. Every tested family
stays below 0.8 in bfloat16 and 0.2 in float32."""


class StepCall(Protocol):
    """Computes a step, as ``ModelCall`` does."""

    def __call__(
        self,
        input_ids: Ints,
        position_ids: Ints | None,
        step: LayerAttention | None,
        rows: Ints | None = None,
    ) -> Tensor:
        """Return logits; see ``ModelCall``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What was seen of a model that passed.

    Attributes:
        spec: What each layer keeps of a token.
        states: What each layer carries from token to token.
        styles: How each layer asked for its scores to be made.
        attention: Who computed it, if possible.
        logits: Logits of the prompt, from ``through_blocks``, float64.
        noise: How far rounding moves each row of them, as ``rounding_noise`` gives it.
    """

    spec: KVSpec
    states: StateSpec
    styles: tuple[AttentionStyle, ...]
    attention: AttentionName
    logits: Tensor
    noise: Tensor


def probe_model(
    model: PreTrainedModel, call: ModelCall, attention: AttentionName = "auto"
) -> Probed:
    """Check that a model gives the same logits through our attention as through its own.

    Args:
        model: In evaluation mode, loaded with our attention.
        call: Calls it.
        attention: Who computes ours, if possible; the blocks are as small as it allows.

    Returns:
        What was seen of it.

    Raises:
        UnsupportedModel: They differ, a layer never asked us or asked for what we do not
            know, or the model fails without an attention of its own.

    Effects: the model is left with our attention; its attention modules may get the step from
    ``call`` from now on.
    """
    prompt, _ = _prompts(call.vocab_size)
    with torch.inference_mode():
        try:
            recorder = _observe_reached(model, call, prompt)
            spec, states = recorder.spec(model), recorder.states.spec
            ours = through_blocks(spec, states, call, model, attention)
            own = _own(model, call, prompt)
            noise = rounding_noise(model, lambda: _own(model, call, prompt), own)
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not model._supports_attention_backend:
                raise UnsupportedModel(
                    f"{type(model).__name__} does not call its attention through the interface of "
                    "transformers, so it cannot be replaced by one that reads blocks"
                ) from error
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be called as Ostinato calls models: one row of "
                f"tokens, no cache and no mask of its own ({type(error).__name__}: {error})"
            ) from error
    _compare(own, ours, noise, model.dtype)
    return Probed(spec, states, recorder.styles(), attention, ours.double(), noise)


def _observe_reached(model: PreTrainedModel, call: ModelCall, prompt: "array[int]") -> "_Recorder":
    """Observe a model; where its layers drop the step, it is handed to their attention."""
    try:
        return _observe(model, call, prompt)
    except StepNotReceived:
        call.hand_step_to_attention()
        return _observe(model, call, prompt)


def _observe(model: PreTrainedModel, call: ModelCall, prompt: "array[int]") -> "_Recorder":
    """Call the model once to see what its layers ask for."""
    register_probe()
    recorder = _Recorder()
    with _attention(model, PROBE_NAME), RowWatch(model):
        call(
            np.array(prompt, dtype=np.int64),
            np.arange(len(prompt)),
            recorder,
        )
    return recorder


def _own(model: PreTrainedModel, call: ModelCall, prompt: "array[int]") -> Tensor:
    """Return the prompt's logits as the model computes them itself, positions included."""
    with _attention(model, "eager"):
        return call(np.array(prompt, dtype=np.int64), None, None)


class _Recorder:
    """Answers one call of the model with plain attention, and notes what each layer wants."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.states = StateRecorder()
        self._styles: dict[int, AttentionStyle] = {}

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Note the shapes of a layer's keys and values; the answer is of no account."""
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends more than once in one call")
        self.layers[layer] = LayerKV(keys.shape[1], keys.shape[2], values.shape[2], style.window)
        self._styles[layer] = style
        queries, keys, values = (t.transpose(0, 1)[None] for t in (queries, keys, values))
        attended = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    def spec(self, model: PreTrainedModel) -> KVSpec:
        """Return what was noted, if each layer that mixes tokens did so through us."""
        config = model.config.get_text_config()
        num_layers = config.num_hidden_layers
        types = getattr(config, "layer_types", None) or [""] * num_layers
        alone = {layer for layer, kind in enumerate(types) if kind in ("mlp", "moe")}
        seen = self.layers.keys() | self.states.spec.layers.keys() | alone
        if seen != set(range(num_layers)):
            raise UnsupportedModel(
                f"of the {num_layers} layers of {type(model).__name__}, only {sorted(seen)} attend "
                "through the attention interface or carry a state that Ostinato knows; the others "
                "keep theirs where it cannot be cached"
            )
        none = LayerKV(0, 0, 0)
        return KVSpec(tuple(self.layers.get(layer, none) for layer in range(num_layers)))

    def styles(self) -> tuple[AttentionStyle, ...]:
        """Return how each layer wants its scores."""
        return tuple(self._styles[layer] for layer in sorted(self._styles))


def _prompts(vocab_size: int) -> tuple["array[int]", "array[int]"]:
    """Draw two prompts, always the same for a vocabulary."""
    drawn = np.random.default_rng(0).integers(vocab_size, size=2 * _NUM_TOKENS).tolist()
    return array("I", drawn[:_NUM_TOKENS]), array("I", drawn[_NUM_TOKENS:])


def _bench(
    spec: KVSpec, model: PreTrainedModel, attention: AttentionName
) -> tuple[AttentionBackend, KVStore]:
    """Choose who computes, and make a store for two prompts."""
    case = AttentionCase(spec, model.dtype, model.dtype, TOKEN_GROUP, model.device)
    chosen = choose_attention("torch" if attention == "torch" else "auto", case)
    size = TOKEN_GROUP if isinstance(chosen, NativeAttention) else _BLOCK_SIZE
    num_blocks = 2 * -(-_NUM_TOKENS // size)
    return chosen, chosen.new_store(spec, num_blocks, size, model.dtype, model.device)


def through_blocks(
    spec: KVSpec,
    states: StateSpec,
    call: StepCall,
    model: PreTrainedModel,
    attention: AttentionName,
) -> Tensor:
    """Return the logits of the probe's prompt, computed chunk by chunk in scattered blocks.

    Args:
        spec: What the layers keep.
        states: What they carry along.
        call: Computes the steps.
        model: Says where and in which dtype.
        attention: Who attends, if possible.

    Returns:
        Shape (num_tokens, vocab_size).
    """
    prompt, stranger = _prompts(cast(Tensor, model.get_input_embeddings().weight).shape[0])
    backend, store = _bench(spec, model, attention)
    of_layer, slots = one_group(spec).of_layer, StateStore(states, 2, model.device)
    num_blocks = store.num_blocks
    scattered = np.random.default_rng(1).permutation(num_blocks).tolist()
    tables = array("I", scattered[0::2]), array("I", scattered[1::2])
    rows = []
    start = 0
    for length in _CHUNKS:
        plan = StepPlan(
            tuple(
                ScheduledSequence(
                    SequenceId(i), tokens[start : start + length], start, (table,), state_slot=i
                )
                for i, (tokens, table) in enumerate(zip((stranger, prompt), tables, strict=True))
            )
        )
        inputs = build_inputs(plan, store.block_size, store.device)
        (metadata,) = inputs.groups
        assert inputs.states is not None, "both have a slot"
        attending = backend.start(metadata, store)
        step = GroupedStep((attending,), of_layer, StateStep(inputs.states, slots))
        logits = call(inputs.input_ids, inputs.position_ids, step)
        rows.append(logits[length:])
        start += length
    return torch.cat(rows)


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use another attention for a while."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _compare(own: Tensor, ours: Tensor, noise: Tensor, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel if logits differ by more than rounding explains."""
    if not own.isfinite().all():
        raise UnsupportedModel(
            f"the model's own logits are not finite in {dtype}: choose another dtype"
        )
    for name, rows in _segments():
        found = in_roundings(ours[rows], own[rows], noise[rows])
        if not found <= _MOST_ROUNDINGS:
            raise UnsupportedModel(
                f"logits of a {name} differ from those of the model's own attention by "
                f"{found:.2g} times what rounding in {dtype} explains (at most "
                f"{_MOST_ROUNDINGS:g} is taken): the model does something in its attention, its "
                "positions or its state that Ostinato does not know"
            )


def _segments() -> Iterator[tuple[str, slice]]:
    """Name the parts of the prompt by how they were computed."""
    yield "first chunk", slice(0, _CHUNKS[0])
    yield "second chunk", slice(_CHUNKS[0], _CHUNKS[0] + _CHUNKS[1])
    yield "decoded token", slice(_CHUNKS[0] + _CHUNKS[1], _NUM_TOKENS)

"""Compares a model with its own attention before it is served.

A model's config does not show everything that its code does. So each model computes a short random
prompt twice before it is served: once with its own attention, and once through a small KV store, in
chunks and scattered blocks, beside another sequence::

    its own       [0 ................................ 24)     one call, dense
    ours          [0 .... 9) [9 ......... 21) 21  22  23      each call with another sequence

A layer that keeps an unknown state, attends across the row, or does not use our attention cannot
pass. The logits may differ by as much as rounding explains, row by row, measured on the model
itself.
Cost: nine calls of the model with a few dozen tokens each.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.backend import AttentionStyle, CallsModel, GroupedStep
from ostinato.runner.attention.mask_request import PROBE_NAME, register_probe
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.registration import (
    ATTENTION_NAME,
    StepNotReceived,
)
from ostinato.runner.attention_choice import AttentionCase, choose_attention
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from ostinato.runner.kv.layer_groups import one_group
from ostinato.runner.model_call import ModelCall
from ostinato.runner.quantization import check_rows
from ostinato.runner.sampling.rounding import in_roundings, rounding_noise
from ostinato.runner.settings import NATIVE_BLOCK, AttentionName
from ostinato.runner.states.step import StateRecorder, StateStep
from ostinato.runner.states.store import StateSpec, StateStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNKS = (9, 12, 1, 1, 1)
_NUM_TOKENS = sum(_CHUNKS)
_SEGMENTS = {
    "first chunk": slice(0, _CHUNKS[0]),
    "second chunk": slice(_CHUNKS[0], sum(_CHUNKS[:2])),
    "decoded token": slice(sum(_CHUNKS[:2]), _NUM_TOKENS),
}
_BLOCK_SIZE = 4
_FINITE_TOKENS = 2
"""Tokens of each sequence in the step that shows finite logits: a model of 4 billion weights takes
ten seconds for the whole prompt, and a number that is not finite spreads to every row."""

_MAX_ROUNDINGS = 4.0
"""Maximum difference of logits, in multiples of the measured rounding noise. Every tested family
stays below 0.8 in bfloat16 and 0.2 in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What the probe found out about a model that passed.

    Attributes:
        spec: KV per token of each layer.
        states: States of the layers that have one.
        styles: Parameters of each layer's attention.
        attention: The requested attention.
        logits: Logits of the prompt, from ``through_blocks``, float64.
        noise: Rounding noise of each row of them, see ``rounding_noise``.
    """

    spec: KVSpec
    states: StateSpec
    styles: tuple[AttentionStyle, ...]
    attention: AttentionName
    logits: Tensor
    noise: Tensor

    @property
    def styles_by_layer(self) -> dict[int, AttentionStyle]:
        """Parameters of attention by layer, for those that attend."""
        return dict(zip(self.spec.attending, self.styles, strict=True))


def probe_model(
    model: "PreTrainedModel", call: ModelCall, attention: AttentionName = "auto"
) -> Probed:
    """Check that a model gives the same logits through our attention as through its own.

    Args:
        model: In evaluation mode, loaded with our attention.
        call: Calls it.
        attention: Computes our attention, if possible; blocks are as small as it allows.

    Raises:
        UnsupportedModel: They differ, a layer does not use our attention or passes unknown
            arguments, or the model fails without its own attention.

    Effects: the model keeps our attention; its attention modules may get the step from ``call``
        from now on.
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


def observe_without_weights(
    model: "PreTrainedModel",
) -> tuple[KVSpec, StateSpec, tuple[AttentionStyle, ...]] | None:
    """Return what each layer of a model on ``meta`` keeps, and how those attend that do.

    None for a model that cannot be called without numbers.
    """
    call = ModelCall(model)
    try:
        with torch.inference_mode(), _one_sequence():
            recorder = _observe_reached(model, call, _prompts(call.vocab_size)[0])
            spec = recorder.spec(model)
    except Exception:  # code of any model, where values of tensors are not defined
        return None
    return spec, recorder.states.spec, recorder.styles()


def check_finite(model: "PreTrainedModel", call: CallsModel, probed: Probed) -> None:
    """Check that all layers together give finite logits; the probe may have seen few of them.

    Args:
        model: Complete.
        call: Computes its steps from now on.
        probed: What is known of all layers.

    Raises:
        UnsupportedModel: They are not finite.

    Cost: one step of a few rows.
    """
    spec, states, attention = probed.spec, probed.states, probed.attention
    with torch.inference_mode():
        logits = through_blocks(spec, states, call, model, attention, (_FINITE_TOKENS,))
    _check_finite(logits, model.dtype)


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Do not look for several sequences among positions, which need numbers for that."""
    from transformers import masking_utils

    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def _observe_reached(
    model: "PreTrainedModel", call: ModelCall, prompt: "array[int]"
) -> "_Recorder":
    """Observe a model; if its layers drop the step, pass it to their attention directly."""
    try:
        return _observe(model, call, prompt)
    except StepNotReceived:
        call.hand_step_to_attention()
        return _observe(model, call, prompt)


def _observe(model: "PreTrainedModel", call: ModelCall, prompt: "array[int]") -> "_Recorder":
    """Call the model once to see how its layers attend."""
    register_probe()
    recorder = _Recorder()
    with _attention(model, PROBE_NAME), check_rows(model):
        call(np.array(prompt, dtype=np.int64), np.arange(len(prompt)), recorder)
    return recorder


def _own(model: "PreTrainedModel", call: ModelCall, prompt: "array[int]") -> Tensor:
    """Return the prompt's logits as the model computes them itself, positions included."""
    with _attention(model, "eager"):
        return call(np.array(prompt, dtype=np.int64), None, None)


class _Recorder:
    """Computes plain attention, and records shapes and parameters of each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.states = StateRecorder()
        self._styles: dict[int, AttentionStyle] = {}

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Record the shapes of a layer's keys and values; the result does not matter."""
        if layer in self.layers:
            raise UnsupportedModel(f"layer {layer} attends more than once in one call")
        self.layers[layer] = LayerKV(keys.shape[1], keys.shape[2], values.shape[2], style.window)
        self._styles[layer] = style
        queries, keys, values = (t.transpose(0, 1)[None] for t in (queries, keys, values))
        attended = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    def spec(self, model: "PreTrainedModel") -> KVSpec:
        """Return the KV of all layers, if each one that mixes tokens used our attention."""
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
        """Return the parameters of each layer's attention."""
        return tuple(self._styles[layer] for layer in sorted(self._styles))


def _prompts(vocab_size: int) -> tuple["array[int]", "array[int]"]:
    """Return two random prompts, always the same for a vocabulary."""
    drawn = np.random.default_rng(0).integers(vocab_size, size=2 * _NUM_TOKENS).tolist()
    return array("I", drawn[:_NUM_TOKENS]), array("I", drawn[_NUM_TOKENS:])


def through_blocks(
    spec: KVSpec,
    states: StateSpec,
    call: CallsModel,
    model: "PreTrainedModel",
    attention: AttentionName,
    chunks: tuple[int, ...] = _CHUNKS,
) -> Tensor:
    """Return the logits of the probe's prompt, computed chunk by chunk in scattered blocks.

    Args:
        spec: KV per token of each layer.
        states: States of the layers that have one.
        call: Computes the steps.
        model: Gives the device and the dtype.
        attention: Computes attention, if possible.
        chunks: Tokens of each step.

    Returns:
        Shape (num_tokens, vocab_size).
    """
    prompt, other = _prompts(model.get_input_embeddings().num_embeddings)
    case = AttentionCase(spec, model.dtype, model.dtype, NATIVE_BLOCK, model.device)
    backend = choose_attention("auto" if attention == "native" else attention, case)
    size = NATIVE_BLOCK if isinstance(backend, NativeAttention) else _BLOCK_SIZE
    num_blocks = 2 * -(-_NUM_TOKENS // size)
    store = backend.new_store(StoreShape(spec, num_blocks, size, model.dtype, model.device))
    of_layer, slots = one_group(spec).of_layer, StateStore(states, 2, model.device)
    scattered = np.random.default_rng(1).permutation(num_blocks).tolist()
    tables = array("I", scattered[0::2]), array("I", scattered[1::2])
    rows = []
    start = 0
    for length in chunks:
        plan = StepPlan(
            tuple(
                ScheduledSequence(
                    SequenceId(i), tokens[start : start + length], start, (table,), state_slot=i
                )
                for i, (tokens, table) in enumerate(zip((other, prompt), tables, strict=True))
            )
        )
        inputs = build_inputs(plan, store.block_size, store.device)
        (metadata,) = inputs.groups
        assert inputs.state_slots is not None, "both have a slot"
        attending = backend.start(metadata, store)
        state_step = StateStep(inputs.state_slots, metadata, slots)
        step = GroupedStep((attending,), of_layer, state_step)
        logits = call(inputs.input_ids, inputs.position_ids, step)
        rows.append(logits[length:])
        start += length
    return torch.cat(rows)


@contextmanager
def _attention(model: "PreTrainedModel", name: str) -> Iterator[None]:
    """Use another attention of the model."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _compare(own: Tensor, ours: Tensor, noise: Tensor, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel if logits differ by more than rounding explains."""
    _check_finite(own, dtype)
    for name, rows in _SEGMENTS.items():
        difference = in_roundings(ours[rows], own[rows], noise[rows])
        if not difference <= _MAX_ROUNDINGS:
            raise UnsupportedModel(
                f"logits of a {name} differ from those of the model's own attention by "
                f"{difference:.2g} times what rounding in {dtype} explains (at most "
                f"{_MAX_ROUNDINGS:g} is taken): the model does something in its attention, its "
                "positions or its state that Ostinato does not know"
            )


def _check_finite(logits: Tensor, dtype: torch.dtype) -> None:
    if not logits.isfinite().all():
        raise UnsupportedModel(
            f"the model's own logits are not finite in {dtype}: choose another dtype"
        )

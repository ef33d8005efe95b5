"""Loads a model weight by weight.

::

    skeleton on meta ─► how each layer attends, what it keeps         (no weight is read)
    trial            ─► probe, choice of the forward                  (one layer of each kind)
    skeleton         ─► read a product's weights, pack them, forget   (all layers)

So the peak of memory is what stays, and the largest product once more. Models that this cannot
load as ``transformers`` would, are loaded by it: most experts in GGUF files, weights
quantized in some formats, and checkpoints that have more weights than the model, or fewer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.checkpoints.load_progress import LoadProgress
from ostinato.runner.experts.mixture import is_experts
from ostinato.runner.forward.codes import Activations
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import (
    Pack,
    key_of,
    pack_linears,
    why_unpacked,
)
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.forward.structure import describe_decoder, pack_model
from ostinato.runner.images.vision import take_encoder
from ostinato.runner.loading.fp8_source import fp8_weights, is_fp8
from ostinato.runner.loading.gguf_source import gguf_source
from ostinato.runner.loading.load_memory import KVBytes, check_memory
from ostinato.runner.loading.merged_experts import as_in_model
from ostinato.runner.loading.mxfp4_source import mxfp4_weights
from ostinato.runner.loading.pretrained import unquantized
from ostinato.runner.loading.skeleton import (
    build_skeleton,
    cut_to_trial,
    fill,
    fill_encoder,
    keep_blocks,
    reads_all,
    trial_config,
    trial_layers,
)
from ostinato.runner.loading.weight_source import (
    Weights,
    WeightSource,
    are_numbers,
    packed_members,
    safetensors,
)
from ostinato.runner.loading.word_codes import METHODS, activations_of, is_in_words
from ostinato.runner.loading.word_source import word_weights
from ostinato.runner.model_call import LaterCall, ModelCall
from ostinato.runner.native.angles import settle_frequencies
from ostinato.runner.native.packed import required_library
from ostinato.runner.probe import Probed, check_finite, observe_without_weights, probe_model
from ostinato.runner.quantization import quantization_settings
from ostinato.runner.select_forward import ChosenForward, choose_forward
from ostinato.runner.settings import AttentionName, ForwardName

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """A model with all its weights, that passed the probe.

    Attributes:
        call: Calls it.
        probed: The probe's result.
        forward: How steps are computed.
        quantization: Quantization of the linear layers; None if they are not quantized.
    """

    call: ModelCall | LaterCall
    probed: Probed
    forward: ChosenForward
    quantization: Quantization | None

    @property
    def model(self) -> "PreTrainedModel":
        """In evaluation mode, with our attention."""
        return self.call.model


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is loaded, and how it is to compute.

    Attributes:
        path: Directory, or GGUF file.
        files: Its weight files.
        config: Its config.
        dtype: Compute dtype.
        attention: The requested attention.
        forward: The requested forward.
        quantization: The requested quantization.
        activations: What rows become before they are multiplied with the checkpoint's own codes.
        kv_bytes: Bytes that settings ask for keys and values.
        name: The model's name, for progress.
        same_bits: Whether a row must have the same bits alone and in any step.
    """

    path: Path
    files: tuple[Path, ...]
    config: PreTrainedConfig
    dtype: torch.dtype
    attention: AttentionName
    forward: ForwardName
    quantization: Quantization | None
    activations: Activations
    kv_bytes: KVBytes
    name: str
    same_bits: bool = False


class PackingRecorder(Protocol):
    """Keeps what a model is packed into, as ``weight_cache.recording`` does."""

    @property
    def is_writing(self) -> bool:
        """Whether anything is kept."""

    def recorded(self, pack: Pack, names: Mapping[int, str]) -> Pack:
        """Return a function that packs likewise, and keeps what it packs."""

    def wait(self) -> None:
        """Wait until all that was packed is kept: its memory moves no more."""

    def add_embedding(self, model: "PreTrainedModel") -> None:
        """Keep the embedding."""

    def add_encoder(self, model: "PreTrainedModel") -> None:
        """Keep the weights of its encoder, the only ones that were read."""

    def add_others(self, model: "PreTrainedModel", source: WeightSource, is_fused: bool) -> None:
        """Keep what is neither packed nor an embedding."""


def stream_model(
    settings: LoadSettings, on_meta: "PreTrainedModel", recorder: PackingRecorder | None = None
) -> tuple[Assembled, nn.Module | None] | None:
    """Load a model weight by weight, and its encoder of images; None if ``transformers`` has to.

    Args:
        settings: What to load.
        on_meta: The model without storage, as ``check_attention_interface`` builds it; it loses
            its encoder.
        recorder: Writes packed weights into the cache folder; None does not.

    Raises:
        BrokenCheckpoint: A file changed meanwhile.
        ConfigError: The model does not fit in free memory, or quantized weights are requested, and
            not supported here.
        UnsupportedModel: The probe does not pass.
    """
    quantized = next(quantization_settings(settings.config), None)
    source = _source(settings, on_meta, quantized)
    if source is None:
        return None
    take_encoder(on_meta)
    if _has_more_than_a_decoder(on_meta, settings.dtype):
        return None
    # Grouped products of experts have no float32 without numbers.
    has_experts = any(map(is_experts, on_meta.modules()))
    observed = observe_without_weights(
        on_meta.to(torch.bfloat16 if has_experts else settings.dtype)
    )
    if observed is None:
        return None
    config = unquantized(settings.config)
    settings = replace(settings, config=config)
    prefix = "GGUF " if settings.path.is_file() else ""
    if quantized is not None and is_in_words(quantized):
        prefix = f"{METHODS[quantized['quant_method']]} "
        if (own := activations_of(quantized)).bits:
            settings = replace(settings, activations=own)
    skeleton = build_skeleton(config, settings.dtype)
    if not reads_all(skeleton, source):
        return None
    (spec, states, seen), styles = observed, _without_sinks(observed[2])
    sinks = _names_of_sinks(on_meta, seen)
    if sinks is None:
        return None
    # Two at least, so that one follows another.
    all_layers = len(spec.layers)
    num_layers = min(all_layers, max(2, trial_layers(skeleton, spec, states, styles)))
    if num_layers > max(2, all_layers // 2):
        return None
    quantization = settings.quantization
    if quantization is None and settings.forward != "plain" and source.kinds:
        quantization = Quantization("stored", {})
    check_memory(skeleton, source, quantization, settings.kv_bytes(spec, settings.dtype))
    kinds = {source.kinds.get(name, "") for name, _ in packed_members(skeleton, source)} - {""}
    trial = _run_trial(settings, source, num_layers, f"{prefix}{', '.join(sorted(kinds))}")
    # What was seen without weights holds for the layers that were tried.
    tried, tried_states = trial.probed, trial.probed.states.layers
    if (
        tried.spec.layers != spec.layers[:num_layers]
        or tried_states != {n: s for n, s in states.layers.items() if n < num_layers}
        or _without_sinks(tried.styles) != styles[: len(tried.styles)]
    ):
        return None
    styles = tuple(_with_sinks(skeleton, source, *each) for each in zip(styles, sinks, strict=True))
    call = ModelCall(skeleton)
    if trial.call.hands_step:
        call.hand_step_to_attention()
    known = Assembled(
        call,
        replace(trial.probed, spec=spec, states=states, styles=styles),
        ChosenForward(trial.forward.name, trial.forward.reason),
        trial.quantization,
    )
    del trial  # its layers, which are read again
    progress = LoadProgress(settings.name, source.num_bytes)
    source.report_reads(progress.add)
    try:
        fill_encoder(skeleton, source, settings.dtype)
        if recorder is not None:
            recorder.add_encoder(skeleton)
        encoder = take_encoder(skeleton)
        forward = complete_model(skeleton, source, known, recorder)
    finally:
        progress.close()
    check_finite(skeleton, forward.fused or call, known.probed)
    read_generation_config(skeleton, settings.path)
    return replace(known, forward=forward), encoder


def _without_sinks(styles: Iterable[AttentionStyle]) -> tuple[AttentionStyle, ...]:
    """Return what layers of one kind have in common: sinks are a layer's own numbers."""
    return tuple(replace(style, sinks=None) for style in styles)


def _names_of_sinks(model: "PreTrainedModel", styles: Sequence[AttentionStyle]) -> list[str] | None:
    """Return the name of each layer's sinks, empty if it has none; None if they are computed."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = ["" if style.sinks is None else names.get(id(style.sinks)) for style in styles]
    return None if None in known else [name for name in known if name is not None]


def _with_sinks(
    model: "PreTrainedModel", source: WeightSource, style: AttentionStyle, name: str
) -> AttentionStyle:
    """Read a layer's sinks into a skeleton, and add them to the parameters of its attention."""
    if not name:
        return style
    path, _, own = name.rpartition(".")
    sinks = nn.Parameter(source.plain(name, model.dtype), requires_grad=False)
    model.get_submodule(path)._parameters[own] = sinks
    return replace(style, sinks=sinks)


def read_generation_config(model: "PreTrainedModel", path: Path) -> None:
    """Give a model the generation settings of its directory, if there are any."""
    if not path.is_file() and (path / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)


def _has_more_than_a_decoder(model: "PreTrainedModel", dtype: torch.dtype) -> bool:
    decoder = model.get_decoder()
    return (
        decoder is None
        or not isinstance(getattr(decoder, "layers", None), nn.ModuleList)
        or type(model.get_input_embeddings()).forward is None
        or model.get_output_embeddings() is None
        or any("*" in part for part in model._get_dtype_plan(dtype))
        or any(
            isinstance(child, transformers.PreTrainedModel) and child is not decoder
            for child in model.base_model.children()
        )
    )


def _source(
    settings: LoadSettings, model: "PreTrainedModel", quantized: Mapping[str, Any] | None
) -> WeightSource | None:
    # The grouped products of transformers take no float64.
    if settings.dtype == torch.float64 and any(map(is_experts, model.modules())):
        return None
    if settings.path.is_file():
        return gguf_source(settings.path, model)
    weights: Weights | None = safetensors(settings.files)
    if quantized is not None and quantized.get("quant_method") == "mxfp4":
        weights = mxfp4_weights(safetensors(settings.files))
    elif quantized is not None:
        weights = quantized_weights(settings.files, quantized, model)
    if weights is None or not are_numbers(weights):
        return None
    return WeightSource(as_in_model(weights, model))


def quantized_weights(
    files: Sequence[Path], quantized: Mapping[str, Any], model: "PreTrainedModel"
) -> Weights | None:
    """Return weights in FP8 or in words of codes; None for other formats.

    Args:
        files: Safetensors.
        quantized: Settings of the quantization.
        model: Names its weights.
    """
    if is_fp8(quantized):
        return fp8_weights(safetensors(files), quantized)
    if is_in_words(quantized):
        names = dict(model.named_parameters(remove_duplicate=False))
        return word_weights(safetensors(files), quantized, names)
    return None


def _run_trial(
    settings: LoadSettings, source: WeightSource, num_layers: int, codes_name: str
) -> Assembled:
    """Compare a model of few layers with itself in every way that a step may be computed."""
    model = build_skeleton(trial_config(settings.config), settings.dtype)
    take_encoder(model)
    cut_to_trial(model, num_layers)
    fill(model, source, settings.dtype, frozenset())
    scale_rope(model, source)
    call = ModelCall(model)
    probed = probe_model(model, call, settings.attention)
    quantization, is_own = settings.quantization, False
    is_unpacked = why_unpacked(settings.dtype, torch.device("cpu")) is not None
    if quantization is None and settings.forward != "plain" and not is_unpacked:
        stored = {
            id(own.weight): source.codes(name, len(own.weight))
            for name, own in packed_members(model, source)
            if name in source.kinds
        }
        if is_own := bool(stored):
            quantization = Quantization(codes_name, stored, settings.activations)
    chosen = choose_forward(model, call, probed, settings.forward, quantization)
    if quantization is not None and is_own:  # of all layers, codes are read when they are packed
        quantization = replace(quantization, stored={})
    return Assembled(call, probed, chosen, quantization)


def scale_rope(model: "PreTrainedModel", source: WeightSource) -> None:
    """Divide the frequencies of RoPE by the factors of a GGUF file, if it has any."""
    factors = source.rope_factors
    if factors is not None:
        rotary = cast(Any, model.get_decoder()).rotary_emb
        settle_frequencies(rotary)
        rotary.inv_freq = rotary.inv_freq / factors.to(rotary.inv_freq)


def complete_model(
    model: "PreTrainedModel",
    source: WeightSource,
    known: Assembled,
    recorder: PackingRecorder | None = None,
) -> ChosenForward:
    """Give a skeleton all its weights, packed as is known to be right.

    Args:
        model: The skeleton.
        source: Its weights.
        known: What the trial showed.
        recorder: Writes them into the cache folder; None does not.
    """
    dtype, chosen = model.dtype, known.forward
    scale_rope(model, source)
    if chosen.name == "plain":
        fill(model, source, dtype, frozenset())
        return chosen
    own = packed_members(model, source)
    names = {key_of(member): name for name, member in own}
    pack = source.packing(names, known.quantization, dtype)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    skipped = {id(member.weight) for _, member in own} - {id(embedding.weight)}
    keep_blocks(model, source, dtype)
    if isinstance(model.get_input_embeddings(), BlockEmbedding):
        skipped.add(id(head.weight))
    fill(model, source, dtype, frozenset(skipped))
    if recorder is not None and recorder.is_writing:
        recorder.add_embedding(model)
        pack = recorder.recorded(pack, names)
    with torch.no_grad():
        if chosen.name == "fused":
            decoder = describe_decoder(model, known.probed.styles_by_layer)
            pack_model(model, decoder, pack)
        else:
            pack_linears(model, pack)
        if recorder is not None:
            recorder.wait()
        if chosen.name == "fused":
            chosen = replace(chosen, fused=FusedForward(decoder, required_library(), known.call))
    kept, packed = model.get_input_embeddings(), model.get_output_embeddings()
    if is_tied and isinstance(kept, BlockEmbedding) and isinstance(packed, PackedLinear):
        packed.tied = (kept,)
    fill(model, source, dtype, frozenset())
    if recorder is not None and recorder.is_writing:
        recorder.add_others(model, source, chosen.fused is not None)
    return chosen

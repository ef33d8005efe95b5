"""Builds a model from an entry: nothing is read, packed, or compared again."""

import logging
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ostinato.core.errors import ConfigError
from ostinato.runner.forward.codes import Activations
from ostinato.runner.forward.decoder import Decoder, Mixture
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.images.vision import take_encoder
from ostinato.runner.images.vision_families import FAMILIES
from ostinato.runner.loading.load_memory import STEP_BYTES, gib
from ostinato.runner.loading.pretrained import quiet
from ostinato.runner.loading.skeleton import build_skeleton, fill_encoder
from ostinato.runner.loading.streamed import (
    Assembled,
    LoadSettings,
    complete_model,
    read_generation_config,
)
from ostinato.runner.memory import available_bytes
from ostinato.runner.model_call import LaterCall, ModelCall
from ostinato.runner.native.packed import required_library
from ostinato.runner.probe import Probed
from ostinato.runner.select_forward import ChosenForward
from ostinato.runner.weight_cache.decoder_record import RecordReader, decoder_record
from ostinato.runner.weight_cache.entry import Entry, EntrySource, Record
from ostinato.runner.weight_cache.facts import probed_of, probed_record
from ostinato.runner.weight_cache.folder import INDEX, cache_folder, remove_folder, why_unsafe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("ostinato")


def find_entry(key: str | None) -> Entry | None:
    """Return the entry of a key; None if there is none that can be used.

    Effects: removes a damaged one, and logs why one is not used.
    """
    if key is None or not (cache_folder() / key / INDEX).exists():
        return None
    folder = cache_folder() / key
    if (reason := why_unsafe(folder)) is not None:
        logger.warning("packed weights are not used: %s", reason)
        return None
    try:
        return Entry.open(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("packed weights in %s are packed again: %s", folder, error)
        remove_folder(folder)
        return None


def index_of(built: Assembled, packed: Mapping[int, str]) -> Record | None:
    """Return what a second start has to know; None if that cannot be kept.

    Args:
        built: The model.
        packed: Names of its packed weights, by their ids.
    """
    probed = probed_record(built.probed, built.model)
    if probed is None or built.forward.name == "plain":
        return None
    fused = built.forward.fused
    return {
        "decoder": None if fused is None else decoder_record(fused.decoder, built.model, packed),
        "probed": probed,
        "hands_step": built.call.hands_step,
        "forward": [built.forward.name, built.forward.reason],
        "quantization": None
        if (own := built.quantization) is None
        else [own.name, own.stored is not None, *astuple(own.activations)],
    }


def restore_model(
    entry: Entry, settings: LoadSettings, images: bool
) -> tuple[Assembled, nn.Module | None]:
    """Build a model whose weights are mapped; its modules only if steps call them.

    Args:
        entry: The weights.
        settings: What to load.
        images: Whether to build its encoder of images as well, if it has one.

    Raises:
        ConfigError: It does not fit in free memory with the keys and values of the settings.
    """
    source = EntrySource(entry)
    encoder = None
    if images and settings.config.model_type in FAMILIES:
        with quiet():
            skeleton = build_skeleton(settings.config, settings.dtype)
            fill_encoder(skeleton, source, settings.dtype)
            encoder = take_encoder(skeleton)
    return _restored(source, settings), encoder


def _restored(source: EntrySource, settings: LoadSettings) -> Assembled:
    index = source.index
    probed = probed_of(index["probed"], settings.attention, source, settings.dtype)
    _check_memory(source.num_bytes, settings.kv_bytes(probed.spec, settings.dtype))
    quantization = None
    if index["quantization"] is not None:
        name, is_stored, *activations = index["quantization"]
        quantization = Quantization(name, {} if is_stored else None, Activations(*activations))
    forward, record = ChosenForward(*index["forward"]), index["decoder"]
    if record is None:
        return _with_modules(source, settings, probed, forward, quantization)
    decoder: Decoder = RecordReader(source, settings.dtype).value(record)

    def build() -> ModelCall:
        built = _with_modules(source, settings, probed, forward, quantization)
        _share_embedding(built.model, decoder.embedding)
        if built.forward.fused is not None:
            _share_mixtures(built.forward.fused.decoder, decoder)
        return cast(ModelCall, built.call)

    call = LaterCall(build, decoder.embedding.num_embeddings, index["hands_step"])
    fused = FusedForward(decoder, required_library(), call)
    return Assembled(call, probed, replace(forward, fused=fused), quantization)


def _with_modules(
    source: EntrySource,
    settings: LoadSettings,
    probed: Probed,
    forward: ChosenForward,
    quantization: Quantization | None,
) -> Assembled:
    """Build a model with all its modules."""
    with quiet():
        skeleton = build_skeleton(settings.config, settings.dtype)
        take_encoder(skeleton)
        call = ModelCall(skeleton)
        if source.index["hands_step"]:
            call.hand_step_to_attention()
        known = Assembled(call, probed, forward, quantization)
        chosen = complete_model(skeleton, source, known)
        read_generation_config(skeleton, settings.path)
    return replace(known, forward=chosen)


def _share_embedding(model: "PreTrainedModel", embedding: nn.Module) -> None:
    """Give a model the embedding that steps read, so that hooks see what they look up."""
    own = model.get_input_embeddings()
    if isinstance(own, nn.Embedding):
        embedding.weight = own.weight
        embedding.padding_idx = cast(Any, own.padding_idx)
    model.set_input_embeddings(embedding)


def _share_mixtures(built: Decoder, decoder: Decoder) -> None:
    """Let steps compute mixtures with a model's modules, whose weights may be replaced."""
    for own, other in zip(decoder.parts(), built.parts(), strict=True):
        if isinstance(own, Mixture) and isinstance(other, Mixture):
            setattr(own.block, own.router, other.packed_router)
            setattr(own.block, own.experts, other.packed_experts)


def _check_memory(weights: int, kv: int) -> None:
    free = available_bytes()
    if free is not None and weights + kv + STEP_BYTES > free:
        raise ConfigError(
            f"the model needs {gib(weights + kv + STEP_BYTES)}: {gib(weights)} of weights, "
            f"{gib(kv)} of keys and values, {gib(STEP_BYTES)} for a step; {gib(free)} are free "
            "(MemAvailable, or what the container's limit leaves): fewer blocks (num_blocks or "
            "kv_cache_memory), a smaller max_model_len or quantization='int4' may fit"
        )

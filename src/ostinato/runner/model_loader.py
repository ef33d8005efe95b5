"""Loads a model, and checks that it can be served correctly."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ostinato.core.config import one_of
from ostinato.errors import ConfigError, OstinatoError, UnsupportedModel
from ostinato.runner.attention.registration import register
from ostinato.runner.attention_choice import on_device
from ostinato.runner.checkpoints.checkpoint import quantized_fingerprint, read_config, weight_files
from ostinato.runner.checkpoints.fingerprints import fingerprinting
from ostinato.runner.checkpoints.generation_config import read_generation_config
from ostinato.runner.checkpoints.gguf_file import open_gguf
from ostinato.runner.checkpoints.model_resolver import resolve_model
from ostinato.runner.forward.codes import IN_GROUPS, PLAIN, Activations
from ostinato.runner.forward.packing import why_unpacked
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.forward.weight_refs import ModelSize
from ostinato.runner.heads import ModelHead
from ostinato.runner.images.vision import Vision, load_vision, take_encoder
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.gguf_source import codes_of_file
from ostinato.runner.loading.load_memory import KVBytes, check_whole
from ostinato.runner.loading.merged_experts import quantized_expert
from ostinato.runner.loading.model_support import (
    check_attention_interface,
    check_config,
    length_limit,
)
from ostinato.runner.loading.pretrained import (
    LARGE_GGUF_BYTES,
    load_config,
    load_saved_tokenizer,
    load_tokenizer,
    load_weights,
    quiet,
    torch_dtype,
    unquantized,
)
from ostinato.runner.loading.streamed import (
    Assembled,
    LoadSettings,
    quantized_weights,
    stream_model,
)
from ostinato.runner.loading.weight_source import Weights, safetensors, state_of
from ostinato.runner.loading.word_codes import is_in_words
from ostinato.runner.loading.word_source import codes_of_words
from ostinato.runner.malloc_tuning import returning_large_blocks
from ostinato.runner.model_call import ModelCall
from ostinato.runner.native.library import Isa, current_isa, library
from ostinato.runner.probe import probe_model
from ostinato.runner.quantization import INSTEAD, check_quantization, quantization_settings
from ostinato.runner.select_forward import choose_forward
from ostinato.runner.settings import (
    ActivationName,
    AttentionName,
    DtypeName,
    ForwardName,
    QuantizationName,
)
from ostinato.runner.weight_cache.cache import WeightCache
from ostinato.runner.weight_cache.entry import Entry
from ostinato.runner.weight_cache.folder import MAX_BYTES
from ostinato.runner.weight_cache.recording import WeightRecorder
from ostinato.runner.weight_cache.restoring import restore_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    name: str | Path,
    dtype: DtypeName = "auto",
    device: torch.device | str = "cpu",
    attention: AttentionName = "auto",
    forward: ForwardName = "auto",
    revision: str | None = None,
    quantization: QuantizationName | None = None,
    activation_dtype: ActivationName = "auto",
    images: bool = True,
    kv_bytes: KVBytes = lambda spec, dtype: 0,
    weight_cache_bytes: int = MAX_BYTES,
    same_bits: bool = False,
) -> LoadedModel:
    """Load a model and check that it can be served correctly.

    Args:
        name: A model's name, a directory, a GGUF file, or a hub repository.
        dtype: Compute dtype; ``auto`` is that of the checkpoint, for GGUF float32 or, from 1 GiB
            on, bfloat16.
        device: Device to compute on.
        attention: The attention that is compared with the model's own.
        forward: How steps may be computed, see ``runner.select_forward``.
        revision: Branch, tag or commit of a hub repository.
        quantization: Quantization of the linear layers; None leaves their weights as they are.
        activation_dtype: What rows become before they are multiplied with codes: ``int8``, with a
            scale for 32 inputs, or ``float``; ``auto`` is ``int8`` with ``w8a8`` and ``w4a8``, and
            for GGUF files from 1 GiB on where there are no tiles of bfloat16 (AMX).
        images: Whether to keep the image encoder, if the model has one.
        kv_bytes: Bytes that settings ask for keys and values, which have to fit as well.
        weight_cache_bytes: Maximum bytes of packed weights in the user's cache folder; 0 keeps and
            uses none.
        same_bits: Whether a row must have the same bits alone and in any step.

    Raises:
        ConfigError: An unknown dtype or forward, a device that does not exist, or one without
            support for quantized weights; activations in 8 bits without weights of codes; or the
            model does not fit in free memory.
        ModelNotFound: No such model.
        BrokenCheckpoint: Files are missing or damaged, or weights do not fit the config.
        UnsupportedModel: It would load, but could not be served correctly.

    Effects: may download; keeps packed weights and the fingerprint in the user's cache folder;
        configures malloc, see ``runner.malloc_tuning``.
    """
    one_of("dtype", dtype, get_args(DtypeName))
    one_of("forward", forward, get_args(ForwardName))
    one_of("activation_dtype", activation_dtype, get_args(ActivationName))
    device = _resolve_device(device)
    quantized = None
    if quantization is not None:
        quantized = Quantization.named(quantization, activation_dtype == "int8")
    path = resolve_model(name, revision)
    request = _Request(
        str(name),
        path,
        dtype,
        device,
        attention,
        forward,
        quantized,
        activation_dtype,
        images,
        kv_bytes,
        same_bits,
    )
    memory = returning_large_blocks() if device.type == "cpu" else nullcontext()
    with memory, quiet(), _named_refusals(path):
        if path.is_dir():
            read_config(path)  # without one it is no checkpoint, whatever else is there
        files = weight_files(path)
        is_host = device.type == "cpu" and not on_device(attention, device)
        cache = WeightCache(path, files, request.facts, weight_cache_bytes * is_host)
        if (entry := cache.find()) is not None:
            try:
                return _load(request, files, cache, entry)
            except (OstinatoError, MemoryError):
                raise
            except Exception as error:  # an entry may be damaged in any way
                cache.remove(entry, error)
        return _load(request, files, cache, None)


@dataclass(frozen=True, slots=True)
class _Request:
    """What ``load_model`` was called with, checked."""

    name: str
    path: Path
    dtype: DtypeName
    device: torch.device
    attention: AttentionName
    forward: ForwardName
    quantization: Quantization | None
    activation_dtype: ActivationName
    images: bool
    kv_bytes: KVBytes
    same_bits: bool

    @property
    def facts(self) -> tuple[str, ...]:
        """Everything that packed weights depend on besides the checkpoint."""
        return (
            self.dtype,
            self.attention,
            self.forward,
            str(self.quantization or ""),
            self.activation_dtype,
        )


def _load(
    request: _Request, files: tuple[Path, ...], cache: WeightCache, entry: Entry | None
) -> LoadedModel:
    """Load a model from packed weights, or else from its checkpoint."""
    path, device = request.path, request.device
    origin = path if entry is None or path.is_dir() else entry.folder
    with open_gguf(path) if origin.is_file() else nullcontext():
        config = load_config(origin)
        if entry is None:  # what is kept was checked
            check_config(config)
        check_quantization(config)
        gguf_bytes = _gguf_bytes(path, files)
        settings = LoadSettings(
            path=path,
            files=files,
            config=config,
            dtype=torch_dtype(request.dtype, config, gguf_bytes),
            attention=request.attention,
            forward=request.forward,
            quantization=request.quantization,
            activations=_activations(request.activation_dtype, gguf_bytes),
            kv_bytes=request.kv_bytes,
            name=request.name,
            same_bits=request.same_bits,
        )
        with fingerprinting(path, files) as weights_digest, cache.recording(entry) as recorder:
            # Before the weights: to convert one of 150,000 words takes a gigabyte.
            tokenizer = load_tokenizer(path) if origin == path else load_saved_tokenizer(origin)
            if entry is not None:
                built, encoder = restore_model(entry, settings, request.images)
                size = ModelSize(*entry.index["size"])
            else:
                built, encoder = _build(settings, device, recorder)
                size = ModelSize.of(built.model)
            _check_activations(request, built.quantization)
            cache.publish(recorder, built, size, weights_digest, config, tokenizer)
            vision, why_no_images = _load_vision(
                path, encoder if request.images else None, config, built, tokenizer
            )
            digest = quantized_fingerprint(weights_digest(), str(built.quantization or ""))
    return LoadedModel(
        name=request.name,
        path=path,
        call=built.call,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(path, config),
        length_limit=length_limit(config),
        vocab_size=built.call.vocab_size,
        dtype=settings.dtype if entry is not None else built.model.dtype,
        device=device,
        fingerprint=digest,
        kv_spec=built.probed.spec,
        state_spec=built.probed.states,
        forward=built.forward,
        size=size,
        mapped_bytes=recorder.num_bytes if entry is None else entry.num_bytes,
        quantization=built.quantization,
        head=ModelHead.of(config),
        vision=vision,
        why_no_images=why_no_images
        if request.images
        else "images are switched off (limit_mm_per_prompt)",
    )


def _activations(name: ActivationName, gguf_bytes: int) -> Activations:
    """Return what rows become before they are multiplied with a checkpoint's own codes."""
    native = library()
    has_tiles = native is not None and current_isa(native) is Isa.AMX  # of bfloat16, for prompts
    if name == "auto":
        return IN_GROUPS if gguf_bytes >= LARGE_GGUF_BYTES and not has_tiles else PLAIN
    return IN_GROUPS if name == "int8" else PLAIN


def _check_activations(request: _Request, quantization: Quantization | None) -> None:
    if request.activation_dtype == "int8" and (
        quantization is None or not quantization.activations.bits
    ):
        raise ConfigError(
            f"activation_dtype='int8': {request.name} has no weights of 8 or 4 bits that are "
            "multiplied as codes; set quantization, to 'int4' or another, or "
            "activation_dtype='auto'"
        )


def _gguf_bytes(path: Path, files: tuple[Path, ...]) -> int:
    return sum(file.stat().st_size for file in files) if path.is_file() else 0


def _build(
    settings: LoadSettings, device: torch.device, recorder: WeightRecorder
) -> tuple[Assembled, nn.Module | None]:
    """Read a model weight by weight if that is possible, else as a whole."""
    register()
    on_meta = check_attention_interface(unquantized(settings.config))
    if device.type == "cpu" and not on_device(settings.attention, device):
        built = stream_model(settings, on_meta, recorder)
        if built is not None:
            return built
        if not any(True for _ in quantization_settings(settings.config)):
            on_meta = check_attention_interface(unquantized(settings.config))
            check_whole(on_meta, settings.dtype, settings.path.is_file())
    return read_whole(settings, device)


@contextmanager
def _named_refusals(path: Path) -> Iterator[None]:
    """Refuse a checkpoint on which code of another library fails."""
    try:
        yield
    except (OstinatoError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of any model may raise anything
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UnsupportedModel(f"{path} cannot be loaded here: {reason}") from error


def read_whole(settings: LoadSettings, device: torch.device) -> tuple[Assembled, nn.Module | None]:
    """Load a model with ``transformers``, then compare and pack it.

    Returns:
        The model, and its image encoder, if it has one.

    Raises:
        ModelError: It cannot be read, or cannot be served correctly.
    """
    path, quantized = settings.path, settings.quantization
    weights = _weights(settings)
    state = None if weights is None else state_of(weights, settings.dtype)
    model = load_weights(path, settings.config, settings.dtype, device, state)
    del state
    encoder = take_encoder(model)
    if quantized is None and settings.forward != "plain":
        quantized = _codes_of_checkpoint(settings, model, weights)
        if quantized is not None and not quantized.activations.bits:
            quantized = replace(quantized, activations=settings.activations)
    call = ModelCall(model)
    probed = probe_model(model, call, settings.attention)
    chosen = choose_forward(model, call, probed, settings.forward, quantized, settings.same_bits)
    return Assembled(call, probed, chosen, quantized), encoder


def _resolve_device(name: torch.device | str) -> torch.device:
    """Return a device, such as ``"cpu"`` or ``"cuda:1"``, after allocating one number on it.

    Raises:
        ConfigError: There is no such device here.
    """
    if not isinstance(name, (str, torch.device)):
        raise ConfigError(_no_device(name, "must be the name of a device"))
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises all three
        raise ConfigError(_no_device(name, str(error).strip().splitlines()[0])) from error
    if device.type == "meta":
        raise ConfigError(_no_device(name, "it has shapes, but no data"))
    return device


def _no_device(name: object, reason: str) -> str:
    shown = str(name) if isinstance(name, torch.device) else name
    return f"device={shown!r}: {reason}; 'cpu' is always there"


def _load_vision(
    path: Path,
    encoder: nn.Module | None,
    config: PreTrainedConfig,
    built: Assembled,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Vision | None, str]:
    """Return the image encoder, or why there is none."""
    if encoder is None:
        return None, f"images of {config.model_type} are not served"
    try:
        return load_vision(path, encoder, built.model, tokenizer), ""
    except UnsupportedModel as error:
        return None, str(error)


def _weights(settings: LoadSettings) -> Weights | None:
    """Return a checkpoint whose weights are codes or in FP8; None for any other.

    Raises:
        UnsupportedModel: It has experts in a format that is not read.
    """
    for own in quantization_settings(settings.config):
        on_meta = check_attention_interface(unquantized(settings.config))
        if (weights := quantized_weights(settings.files, own, on_meta)) is not None:
            return weights
        stored = {} if settings.path.is_file() else safetensors(settings.files)
        if (part := quantized_expert(stored)) is not None:
            raise UnsupportedModel(
                f"{settings.config.model_type}, quantized by {own.get('quant_method')}: {part} is "
                "part of an expert in a format that is not run; experts are in GPTQ, AWQ, FP8, "
                "MXFP4, or in weights of 4 or 8 bits of compressed-tensors, alone or with "
                f"activations of 8 bits with a dynamic scale per token; {INSTEAD}"
            )
    return None


def _codes_of_checkpoint(
    settings: LoadSettings, model: "PreTrainedModel", weights: Weights | None
) -> Quantization | None:
    """Return the checkpoint's own codes; None if there are none, or they are not supported here."""
    if why_unpacked(model.dtype, model.device) is not None:
        return None
    own = next(filter(is_in_words, quantization_settings(settings.config)), None)
    if weights is not None and own is not None:
        return codes_of_words(weights, own, model)
    return codes_of_file(settings.path, model) if settings.path.is_file() else None


def _eos_token_ids(path: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the ids at which ``generate`` stops."""
    published = {} if path.is_file() else read_generation_config(path)[0]
    ids: Any = published.get("eos_token_id", getattr(config, "eos_token_id", None))
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))

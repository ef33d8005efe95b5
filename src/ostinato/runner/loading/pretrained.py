"""Reads config, weights and tokenizer of a checkpoint with ``transformers``.

What was loaded is checked, since the library would replace missing weights by random numbers. Code
that comes with a checkpoint is never run.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.attention.registration import ATTENTION_NAME
from ostinato.runner.checkpoints.checkpoint import read_config
from ostinato.runner.checkpoints.gguf_file import correct_config
from ostinato.runner.loading.model_support import auto_class
from ostinato.runner.settings import DtypeName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT_METHODS = (
    *("__call__", "encode", "decode", "tokenize", "_encode_plus", "_decode"),
    *("convert_tokens_to_string", "apply_chat_template"),
)
"""What turns text into tokens and back."""

LARGE_GGUF_BYTES = 2**30
"""Bytes of a GGUF file from which ``auto`` is bfloat16, and 8 bits for activations: a step of a
large model takes less than half of the time, and keys and values half as much memory; a small one
is quick in float32."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and warnings of ``transformers``."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def load_config(path: Path) -> PreTrainedConfig:
    """Read the config of a directory or of a GGUF file."""
    known = transformers.CONFIG_MAPPING
    if not path.is_file() and (kind := read_config(path)["model_type"]) not in known:
        raise UnsupportedModel(
            f"model type {kind!r} is not in the installed transformers, and code that comes with "
            "checkpoints is not run"
        )
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(**_origin(path))
    except Exception as error:  # a model's checks of its config may raise anything
        if path.is_file():
            raise UnsupportedModel(f"{path} is not understood by transformers: {error}") from error
        raise BrokenCheckpoint(f"{path}: config.json is not understood: {error}") from error
    if path.is_file():
        correct_config(config, path)
    return config


def torch_dtype(name: DtypeName, config: PreTrainedConfig, gguf_bytes: int = 0) -> torch.dtype:
    """Return the dtype of a name; ``auto`` is the checkpoint's.

    Args:
        name: The setting ``dtype``.
        config: The checkpoint's.
        gguf_bytes: Bytes of a GGUF file in all its parts, which names no dtype; 0 for others.
    """
    if name != "auto":
        return cast(torch.dtype, getattr(torch, name))
    if gguf_bytes >= LARGE_GGUF_BYTES:
        return torch.bfloat16
    stored = config.get_text_config().dtype or config.dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def load_weights(
    path: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    state: dict[str, Any] | None = None,
) -> "PreTrainedModel":
    """Build the model and read its weights, each exactly once, unless they were read."""
    architecture: Any = auto_class(config)
    if state is not None:
        config = unquantized(config)
        with torch.device("meta"):  # an automatic class needs a path
            architecture = type(architecture.from_config(config))
    try:
        loaded: Any = architecture.from_pretrained(
            **_weights_of(path, state),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            # The library's grouped expert kernels take no float64; its plain ones do.
            **({"experts_implementation": "eager"} if dtype == torch.float64 else {}),
        )
    except (ImportError, ValueError, NotImplementedError) as error:
        raise UnsupportedModel(f"{path}: the weights cannot be read here: {error}") from error
    except (RuntimeError, OSError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{path}: the weights do not load: {error}") from error
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(entry) for entry in info[kind])
        if names:
            raise BrokenCheckpoint(
                f"{path}: {len(names)} {kind.replace('_', ' ')} among the weights, such as "
                f"{', '.join(names[:3])}: they do not belong to this config"
            )
    if state is not None and (path / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return cast("PreTrainedModel", model.eval().to(device))


def _weights_of(path: Path, state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of ``transformers`` for the origin of weights."""
    if state is not None:
        return {"pretrained_model_name_or_path": None, "state_dict": state}
    if path.is_file():
        return {**_origin(path), "quantization_config": transformers.GgufConfig(dequantize=True)}
    return {**_origin(path), "use_safetensors": True}


def unquantized(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the same model with plain weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer of a checkpoint; None if there are no files of one.

    Raises:
        BrokenCheckpoint: It is damaged.
    """
    if path.is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            **_origin(path)
        )
    except Exception as error:  # the tokenizer library raises plain Exception for bad JSON
        raise BrokenCheckpoint(f"{path}: the tokenizer does not load: {error}") from error
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer that ``load_saved_tokenizer`` reads in a second.

    Raises:
        ValueError: It would not be the same: its class has code of its own, or sets what its files
            do not say.
    """
    plain: Any = transformers.PreTrainedTokenizerFast
    kinds: Any = type(tokenizer), plain
    own = [n for n in _TEXT_METHODS if len({getattr(kind, n, None) for kind in kinds}) > 1]
    if not isinstance(tokenizer, plain) or own:
        raise ValueError(f"{type(tokenizer).__name__} has its own {', '.join(own) or 'code'}")
    tokenizer.save_pretrained(folder)
    saved: Any = load_saved_tokenizer(folder)
    kept: Any = tokenizer
    if (
        saved.backend_tokenizer.to_str() != kept.backend_tokenizer.to_str()
        or saved.special_tokens_map != kept.special_tokens_map
        or saved.chat_template != kept.chat_template
    ):
        raise ValueError(f"the files of {type(tokenizer).__name__} do not give the same tokenizer")


def load_saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Read what ``save_tokenizer`` saved; None if there is nothing.

    The class that the files name is not used: it would build another tokenizer of the same words.
    """
    if not (folder / "tokenizer.json").exists():
        return None
    loaded: PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def _origin(path: Path) -> dict[str, Any]:
    """Return the arguments of ``transformers`` for the origin of a config, tokenizer or weights."""
    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    return {**place, "trust_remote_code": False}

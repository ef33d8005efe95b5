"""Finds the directory or file of a model.

In this order: a model embedded in the package, one that ``ostinato models get`` fetches, a
directory, a GGUF file, a repository of the hub.
"""

from importlib.resources import files
from pathlib import Path

import huggingface_hub

from ostinato.errors import ConfigError, ModelNotFound
from ostinato.runner.checkpoints.fetched_models import FETCHED_MODELS, fetched_file
from ostinato.runner.checkpoints.gguf_file import find_gguf, first_part, parts

EMBEDDED_MODELS = ("tiny-shakespeare",)
"""Models that come inside the package."""

KNOWN_MODELS = (*EMBEDDED_MODELS, *FETCHED_MODELS)

_FILE_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
"""The files that are fetched from a hub repository: no pickles, no code."""


def resolve_model(name: str | Path, revision: str | None = None) -> Path:
    """Return the directory or the GGUF file of a model, fetching it from the hub if need be.

    Args:
        name: A model's name, a directory, a GGUF file, or a hub repository such as
            ``"Qwen/Qwen3-0.6B"``.
        revision: Branch, tag or commit of a hub repository; None is its main branch.

    Raises:
        ModelNotFound: It is none of these, or the hub cannot be reached.
        ConfigError: A revision was given, and the name is not that of a hub repository.

    Effects: may download into the hub's cache.
    """
    local = _local(str(name))
    if local is not None:
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r}: {str(name)!r} is no repository of the hub; leave it out"
            )
        return local
    if _looks_like_a_path(str(name)):
        raise ModelNotFound(
            f"model {str(name)!r}: no such directory or GGUF file, and no name of a hub repository "
            f"(owner/name); models known by name: {', '.join(KNOWN_MODELS)}"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(name), revision=revision, allow_patterns=_FILE_PATTERNS
            )
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"model {str(name)!r}: none known by name ({', '.join(KNOWN_MODELS)}), no directory "
            f"{str(Path(name).absolute())!r}, and the hub did not give it: {reason}"
        ) from error


def _local(name: str) -> Path | None:
    """Return the model of a name on this machine; None if there is none.

    Raises:
        ModelNotFound: It is known by name, and was not fetched.
        BrokenCheckpoint: It is one part of several, and others are missing.
    """
    if name in EMBEDDED_MODELS:
        return Path(str(files("ostinato.models").joinpath(name)))
    if name in FETCHED_MODELS:
        return fetched_file(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        path = find_gguf(path)
    if path.suffix == ".gguf" and path.is_file():
        return parts(first_part(path))[0]
    return path if name and path.is_dir() else None


def _looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be that of a hub repository."""
    return not name or name[0] in "./~" or name.count("/") > 1 or "\\" in name

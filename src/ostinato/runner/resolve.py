"""Which directory does a model's name mean?

In this order: a model embedded in the package, a directory, a repository of the hub.
"""

from importlib.resources import files
from pathlib import Path

import huggingface_hub

from ostinato.core.errors import ConfigError, ModelNotFound

EMBEDDED_MODELS = ("tiny-shakespeare",)
"""Models that come inside the package."""

_WANTED_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
"""What is fetched of a hub repository: no pickles, no code."""


def resolve_model(name: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a model, fetching it from the hub if need be.

    Args:
        name: An embedded model's name, a directory, or a hub repository such as
            ``"Qwen/Qwen3-0.6B"``.
        revision: Branch, tag or commit of a hub repository; None is its main branch.

    Raises:
        ModelNotFound: It is none of these, or the hub cannot be reached.
        ConfigError: A revision was given, and the name is no hub repository's.

    Effects: may download into the hub's cache.
    """
    directory = Path(name).expanduser()
    is_embedded = str(name) in EMBEDDED_MODELS
    if is_embedded or (str(name) and directory.is_dir()):
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r}: {str(name)!r} is no repository of the hub; leave it out"
            )
        return Path(str(files("ostinato.models").joinpath(str(name)))) if is_embedded else directory
    if _looks_like_a_path(str(name)):
        raise ModelNotFound(
            f"model {str(name)!r}: no such directory, and no name of a hub repository "
            f"(owner/name); embedded models: {', '.join(EMBEDDED_MODELS)}"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(name), revision=revision, allow_patterns=_WANTED_FILES
            )
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"model {str(name)!r}: not embedded ({', '.join(EMBEDDED_MODELS)}), no directory "
            f"{str(directory.absolute())!r}, and the hub did not give it: {reason}"
        ) from error


def _looks_like_a_path(name: str) -> bool:
    """Whether a name cannot be a hub repository's, so that no network needs to be asked."""
    return not name or name[0] in "./~" or name.count("/") > 1 or "\\" in name

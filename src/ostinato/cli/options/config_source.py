"""Finds a model's config.

In this order: a model that is fetched by name, a file, a directory, a model inside the package,
the Hugging Face hub. Only the config is read or fetched, never the weights.
"""

import json
import logging
from importlib import resources
from pathlib import Path

from rich.console import Console

from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.errors import BrokenCheckpoint, ModelNotFound
from ostinato.lab.size.kv_config import Config
from ostinato.runner.checkpoints.fetched_models import FETCHED_MODELS

_NAME = "config.json"


def load_config(model: str) -> Config:
    """Return a model's parsed ``config.json``.

    Args:
        model: A ``config.json``, a directory with one, or the name of a known model or of a
            repository on the hub.

    Raises:
        ModelNotFound: There is no such model, or the hub cannot be reached.
        BrokenCheckpoint: The file is not a JSON object.

    Effects: a hub name is fetched into the hub's own cache.
    """
    if model in FETCHED_MODELS:
        return dict(FETCHED_MODELS[model].config)
    source = _find(model)
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"{source} holds {type(config).__name__}, not a JSON object")
    return config


def _find(model: str) -> Path:
    """Return the path of the config."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / _NAME).is_file():
            raise ModelNotFound(f"{model} is a directory without {_NAME}")
        return path / _NAME
    if path.is_file():
        return path
    if model == DEFAULT_MODEL:
        return embedded_folder(model) / _NAME
    if model.startswith((".", "/", "~")) or model.endswith(".json"):
        raise ModelNotFound(f"{model}: there is no such file or directory")
    return _fetch(model)


def embedded_folder(model: str) -> Path:
    """Return the directory of a bundled model."""
    return Path(str(resources.files("ostinato.models").joinpath(model)))


def _fetch(model: str) -> Path:
    """Fetch a config from the hub."""
    # Imported here: most calls need no network, and start faster without its libraries.
    from huggingface_hub import errors, hf_hub_download

    # Its log line for each retry would hide our message.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        with Console(stderr=True).status(f"Asking the Hugging Face hub for {model} ..."):
            return Path(hf_hub_download(model, _NAME))
    except errors.HFValidationError:
        cause = "and not a valid name of a repository on the hub"
    except errors.LocalEntryNotFoundError:
        cause = "and the hub cannot be reached"
    except errors.GatedRepoError:
        cause = "and on the hub it is gated: accept its terms there and run `hf auth login`"
    except errors.RepositoryNotFoundError:
        cause = "and there is no such repository on the hub; if it is private, run `hf auth login`"
    except errors.EntryNotFoundError:
        cause = f"and its repository on the hub has no {_NAME}"
    except OSError as error:
        cause = f"and the hub's response was invalid: {error}"
    raise ModelNotFound(
        f"{model!r} is not a file, directory or bundled model ({DEFAULT_MODEL}), {cause}"
    )

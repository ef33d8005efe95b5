"""On what packed weights depend, and what the probe learned about them.

The layout of packed codes and which forward passes the probe may differ between instruction sets.
So a key has everything that either depends on: the checkpoint's fingerprint, settings, the
instruction set, the layout, and the versions of all code that loads a model.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from ostinato.runner import native
from ostinato.runner.native.code_packing import packs_blocks
from ostinato.runner.native.library import PATH, attention_isa, current_isa, library
from ostinato.runner.probe import Probed
from ostinato.runner.settings import AttentionName
from ostinato.runner.states.store import StateSpec
from ostinato.runner.weight_cache.decoder_record import (
    RecordReader,
    RecordWriter,
    Unkept,
)
from ostinato.runner.weight_cache.entry import EntrySource, Record

FORMAT = 8
"""Version of the index and of the layout of tiles."""

_PACKAGES = ("ostinato", "torch", "transformers", "gguf", "tokenizers")


def key_of(fingerprint: bytes, settings: tuple[str, ...]) -> str | None:
    """Return the name of an entry; None where nothing is packed.

    Args:
        fingerprint: The checkpoint's.
        settings: Names of everything that was requested.
    """
    loaded = library()
    if loaded is None:
        return None
    isas = current_isa(loaded).name, attention_isa(loaded).name
    layout = "blocks" if packs_blocks() else "pairs"
    facts = [FORMAT, fingerprint.hex(), settings, isas, layout, _code()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return what changes with the code that loads models."""
    versions = [version(name) for name in _PACKAGES]
    room = Path(native.__file__).parents[1]
    files = sorted((*room.rglob("*.py"), PATH))
    states = [(str(file.relative_to(room)), *_times(file)) for file in files]
    return hashlib.sha256(json.dumps([versions, states]).encode()).hexdigest()


def _times(file: Path) -> Iterator[int]:
    state = file.stat()
    yield from (state.st_size, state.st_mtime_ns)


def probed_record(probed: Probed, model: nn.Module) -> Record | None:
    """Return what the probe learned of a model, for the index; None if it cannot be kept."""
    writer = RecordWriter(model, {})
    try:
        return {
            "spec": writer.value(probed.spec),
            "states": writer.value(tuple(probed.states.layers.items())),
            "styles": writer.value(probed.styles),
        }
    except Unkept:
        return None


def probed_of(
    record: Record, attention: AttentionName, weights: EntrySource, dtype: torch.dtype
) -> Probed:
    """Return what the probe learned, without the logits that it compared.

    Args:
        record: As ``probed_record`` returned it.
        attention: The setting.
        weights: The entry's.
        dtype: Compute dtype.
    """
    reader = RecordReader(weights, dtype)
    spec, states, styles = (reader.value(record[name]) for name in ("spec", "states", "styles"))
    nothing = torch.empty(0)
    return Probed(spec, StateSpec(dict(states)), styles, attention, nothing, nothing)

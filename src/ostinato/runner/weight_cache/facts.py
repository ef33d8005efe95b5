"""On what packed weights depend, and what the probe learned about them.

The layout of packed codes and which forward passes the probe may differ between instruction sets.
So a key has everything that either depends on: the checkpoint's fingerprint, settings, the
instruction set, the layout, and the versions of all code that loads a model.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.runner import native
from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.kv.kv_store import KVSpec, LayerKV
from ostinato.runner.native.code_packing import packs_blocks
from ostinato.runner.native.library import PATH, attention_isa, current_isa, library
from ostinato.runner.probe import Probed
from ostinato.runner.settings import AttentionName
from ostinato.runner.states.store import StateShape, StateSpec

FORMAT = 6
"""Version of the index and of the layout of tiles."""

_PACKAGES = ("ostinato", "torch", "transformers", "gguf", "tokenizers")
_STYLE = ("scale", "window", "soft_cap")


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


def probed_record(probed: Probed, model: nn.Module) -> dict[str, Any] | None:
    """Return what the probe learned of a model, for the index; None if it cannot be kept."""
    names = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    sinks = [
        None if style.sinks is None else names.get(style.sinks.data_ptr(), "")
        for style in probed.styles
    ]
    if "" in sinks:
        return None
    return {
        "layers": [
            [layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.sliding_window]
            for layer in probed.spec.layers
        ],
        "states": [
            [layer, [[each.shape, str(each.dtype).removeprefix("torch.")] for each in shapes]]
            for layer, shapes in probed.states.layers.items()
        ],
        "styles": [[getattr(style, name) for name in _STYLE] for style in probed.styles],
        "sinks": sinks,
    }


def probed_of(
    record: dict[str, Any], attention: AttentionName, weight: Callable[[str], Tensor]
) -> Probed:
    """Return what the probe learned, without the logits that it compared.

    Args:
        record: As ``probed_record`` returned it.
        attention: The setting.
        weight: Returns a weight by its name.
    """
    return Probed(
        KVSpec(tuple(LayerKV(*layer) for layer in record["layers"])),
        StateSpec(
            {
                layer: tuple(StateShape(tuple(s), getattr(torch, dtype)) for s, dtype in shapes)
                for layer, shapes in record["states"]
            }
        ),
        tuple(
            AttentionStyle(
                **dict(zip(_STYLE, style, strict=True)),
                sinks=None if name is None else weight(name),
            )
            for style, name in zip(record["styles"], record["sinks"], strict=True)
        ),
        attention,
        torch.empty(0),
        torch.empty(0),
    )

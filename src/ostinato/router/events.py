"""KV events of vLLM, SGLang and our engine, as one form.

All three send msgpack batches ``[ts, [event, ...], rank]``. An event is an array that begins with
its name, or, in newer versions, a map with its name under ``type``; both say the same::

    ["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name, extra keys,
                    group, kind, window]
    {"type": "BlockStored", "block_hashes": ..., "cache_salt": ...}

Hashes are only names here, to know which blocks a removal means: tokens travel with every store,
so no engine's hash function has to be reproduced.

Sources: vLLM's ``distributed/kv_events.py`` and SGLang's ``disaggregation/kv_events.py`` for the
fields; written anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ostinato.observe.events import salt_name

BlockName = bytes | int
"""An engine's hash of a block."""

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "remaining_copy_counts"),
    "AllBlocksCleared": (),
}
"""Names of the fields of events that are arrays, in their order."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Neighbouring full blocks became findable.

    Attributes:
        hashes: In token order.
        parent: Of the block before the first; None at the start of a prompt.
        tokens: Of all blocks, shape (num_blocks * block_size,); empty where a tier that took
            known blocks does not repeat them.
        block_size: Tokens per block.
        adapter: Name; empty without one.
        salt: ``salt_name`` of the tenant's; empty for the shared namespace, and behind a parent.
        extras: What images add, one byte string per block; empty if no block has any.
        medium: Such as ``"GPU"``; empty where the engine does not say.
        group: Of layers.
        is_window: The layers see a window only.
    """

    hashes: tuple[BlockName, ...]
    parent: BlockName | None
    tokens: Sequence[int]
    block_size: int
    adapter: str = ""
    salt: str = ""
    extras: tuple[bytes, ...] = ()
    medium: str = ""
    group: int = 0
    is_window: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of each of these blocks is gone from a medium."""

    hashes: tuple[BlockName, ...]
    medium: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a worker.

    Attributes:
        sequence: Its number, from 0 without gaps.
        time_s: When the worker sent it, by the worker's clock.
        events: In the order in which they happened.
    """

    sequence: int
    time_s: float
    events: tuple[Event, ...]


class UnusableEvents(ValueError):
    """Events that are none, or that contradict themselves or earlier ones."""


def decode(sequence: int, payload: bytes) -> EventBatch:
    """Read a batch; events of names that are not known are left out.

    Raises:
        UnusableEvents: It is no batch of KV events.
    """
    try:
        time_s, events, *_ = msgspec.msgpack.decode(payload)
        read = tuple(event for each in events if (event := _event(each)) is not None)
        return EventBatch(sequence, float(time_s), read)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UnusableEvents(f"batch {sequence} is no batch of KV events: {error}") from error


def _event(written: Any) -> Event | None:
    if isinstance(written, dict):
        kind, fields = written["type"], written
    else:
        kind = written[0]
        fields = dict(zip(_FIELDS.get(kind, ()), written[1:], strict=False))
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return _removed(fields)
    return Cleared() if kind == "AllBlocksCleared" else None


def _stored(fields: dict[str, Any]) -> Stored:
    hashes, tokens = tuple(fields["block_hashes"]), tuple(fields["token_ids"])
    if not all(isinstance(token, int) and 0 <= token < 2**32 for token in tokens):
        raise UnusableEvents("token ids are no integers below 2**32")
    adapter = fields.get("lora_name") or fields.get("lora_id")
    adapter = "" if adapter is None else str(adapter)
    parent = fields.get("parent_block_hash")
    salt, extras = _extras(fields.get("extra_keys") or (), adapter, parent is None)
    salt = fields.get("cache_salt") or salt
    return Stored(
        hashes,
        parent,
        tokens,
        int(fields["block_size"]),
        adapter,
        salt_name(salt.encode()) if salt and parent is None else "",
        extras,
        fields.get("medium") or "",
        fields.get("group_idx") or 0,
        fields.get("kv_cache_spec_sliding_window") is not None,
    )


def _extras(
    per_block: Sequence[Sequence[Any] | None], adapter: str, is_first: bool
) -> tuple[str, tuple[bytes, ...]]:
    """Return the salt, which stands last in a prompt's first block, and the rest of all blocks."""
    salt, rest = "", []
    for place, keys in enumerate(per_block):
        kept = [key for key in keys or () if key != adapter]
        if place == 0 and is_first and kept and isinstance(kept[-1], str):
            salt = kept.pop()
        rest.append(b"".join(map(_encoded, kept)))
    return salt, tuple(rest) if any(rest) else ()


def _encoded(key: Any) -> bytes:
    return key if isinstance(key, bytes) else msgspec.msgpack.encode(key)


def _removed(fields: dict[str, Any]) -> Removed:
    hashes = tuple(fields["block_hashes"])
    copies = fields.get("remaining_copy_counts") or ()
    if copies:
        hashes = tuple(name for name, left in zip(hashes, copies, strict=True) if not left)
    return Removed(hashes, fields.get("medium") or "", fields.get("group_idx") or 0)

"""KV events of vLLM, SGLang and Ostinato, in one form.

All three send msgpack batches ``[ts, [event, ...], rank]``. An event is an array that begins with
its name, or, in newer versions, a map with its name under ``type``::

    ["BlockStored", hashes, parent, tokens, block size, lora id, medium, lora name, extra keys,
                    group, kind, window]
    {"type": "BlockStored", "block_hashes": ..., "cache_salt": ...}

Hashes are only names of blocks: every store has its tokens, so that no engine's hash function has
to be reproduced.

Fields as in vLLM's ``distributed/kv_events.py`` and SGLang's ``disaggregation/kv_events.py``.
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
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "remaining_copy_counts"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Fields of events that are arrays, in order."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive full blocks were cached.

    Attributes:
        hashes: In token order.
        parent: Hash of the block before the first; None at the start of a prompt.
        tokens: Tokens of all blocks, shape (num_blocks * block_size,); empty if a tier that stored
            known blocks does not repeat them.
        block_size: Tokens per block.
        adapter: Name; empty without one.
        salt: ``salt_name`` of the tenant; empty for the shared namespace, and after a parent.
        extras: Digests of images, one byte string per block; empty if no block has any.
        medium: Such as ``"GPU"``; empty if the engine does not say.
        group: Group of layers.
        is_window: Whether the layers have a sliding window.
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
    """The last copy of each block was removed from a medium."""

    hashes: tuple[BlockName, ...]
    medium: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks were removed."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a worker.

    Attributes:
        sequence: Its number, from 0 without gaps.
        time_s: When the worker sent it, by the worker's clock.
        events: Its events, in order.
    """

    sequence: int
    time_s: float
    events: tuple[Event, ...]


class UnusableEvents(ValueError):
    """Events that are malformed, or contradict themselves or earlier ones."""


def decode(sequence: int, payload: bytes) -> EventBatch:
    """Decode a batch; unknown events are left out.

    Raises:
        UnusableEvents: It is not a batch of KV events.
    """
    try:
        time_s, events, *_ = msgspec.msgpack.decode(payload)
        read = tuple(event for each in events if (event := _event(each)) is not None)
        return EventBatch(sequence, float(time_s), read)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UnusableEvents(f"batch {sequence} is not a batch of KV events: {error}") from error


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
        raise UnusableEvents("token ids must be integers below 2**32")
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
    """Return the salt, the last key of a prompt's first block, and the other keys of all blocks."""
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

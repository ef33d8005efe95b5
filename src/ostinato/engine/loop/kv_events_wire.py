"""The wire format of KV events, which is vLLM's: msgpack arrays, class name first.

::

    [ts, [event, ...], nil]

    ["BlockStored", hashes, parent, tokens, block size, nil, medium, adapter,
                    extra keys, group, kind, window]
    ["BlockRemoved", hashes, medium, group]
    ["AllBlocksCleared"]

The number of a batch is a frame of its own. A tenant's salt is not sent, only its ``salt_name``
with the first block of a prompt; the digests cannot be computed without the salt itself.

Source: vLLM's documentation of KV events (``KVEventBatch``); written anew.
"""

from typing import Any

import msgspec

from ostinato.observe import events
from ostinato.observe.events import images_of, salt_name

FULL_ATTENTION = "full_attention"
SLIDING_WINDOW = "sliding_window"


class WireEvent(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True
):
    """What all events share: an array that begins with the name of the class."""


class BlockStored(WireEvent, frozen=True):
    """Neighbouring full blocks became findable.

    Attributes:
        block_hashes: SHA-256 digests, 32 bytes each, one per block, in token order.
        parent_block_hash: Digest of the block before the first; None at the start of a prompt.
        token_ids: Of all blocks, shape (num_blocks * block_size,).
        block_size: Tokens per block.
        lora_id: Always None: adapters have no numbers here.
        medium: ``"CPU"`` or ``"GPU"`` for the pool; ``"CPU"`` for the host memory of a GPU's tier;
            ``"disk"`` or ``"remote"`` for other tiers.
        lora_name: Content digest of the adapter in hexadecimal digits; None without one.
        extra_keys: Per block None, or a pair for each image, of its digest in hexadecimal digits
            and its offset from the block's start, as in vLLM, then one byte string that is hashed;
            last in the first block of a prompt is the name of the tenant's salt. None if no block
            has any.
        group_idx: Group of layers; 0 is full attention.
        kv_cache_spec_kind: ``"full_attention"`` or ``"sliding_window"``.
        kv_cache_spec_sliding_window: Tokens that such a layer sees; None for full attention.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(WireEvent, frozen=True):
    """The last copies of blocks were removed."""

    block_hashes: tuple[bytes, ...]  # SHA-256 digests
    medium: str | None  # ``"CPU"``, ``"GPU"``, ``"disk"`` or ``"remote"``
    group_idx: int | None = None  # group of layers; 0 is full attention


class AllBlocksCleared(WireEvent, frozen=True):
    """Nothing is cached any more."""


class WireBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one message carries, with the events in the order in which they happened."""

    ts: float  # seconds since 1970
    events: tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]
    data_parallel_rank: int | None = None  # always None: an engine is one rank


class BatchEncoder:
    """Writes batches of one cache, in any thread."""

    def __init__(self, medium: str, windows: tuple[int, ...] = (), zero_s: float = 0.0) -> None:
        """Set what all events have in common.

        Args:
            medium: ``"CPU"`` or ``"GPU"``: where the pool is.
            windows: Tokens that the layers of groups 1, 2, ... see.
            zero_s: Seconds from 1970 to the zero of the cache's clock.
        """
        self._medium = medium
        self._windows = windows
        self._zero_s = zero_s

    def encode(self, batch: events.EventBatch) -> bytes:
        """Return a batch as msgpack, without its number."""
        written = tuple(map(self._event, batch.events))
        return msgspec.msgpack.encode(WireBatch(self._zero_s + batch.time_s, written))

    def _event(self, event: events.Event) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, events.BlockStored):
            return self._stored(event)
        if isinstance(event, events.BlockRemoved):
            return BlockRemoved(event.digests, event.medium or self._medium, event.group)
        return AllBlocksCleared()

    def _stored(self, event: events.BlockStored) -> BlockStored:
        window = self._windows[event.group - 1] if event.group else None
        extras = _extra_keys(event)
        return BlockStored(
            block_hashes=event.digests,
            parent_block_hash=event.parent,
            token_ids=tuple(event.tokens),
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium or self._medium,
            lora_name=event.identity.adapter.hex() or None,
            extra_keys=extras if any(extras) else None,
            group_idx=event.group,
            kv_cache_spec_kind=FULL_ATTENTION if window is None else SLIDING_WINDOW,
            kv_cache_spec_sliding_window=window,
        )


ExtraKey = tuple[str, int] | bytes | str
"""An image, what is hashed of a block besides its tokens, or the name of a salt."""


def _extra_keys(event: events.BlockStored) -> tuple[tuple[ExtraKey, ...] | None, ...]:
    extras = [None if extra is None else _keys_of(extra) for extra in event.extras]
    salt = event.identity.root.tenant
    if event.parent is None and salt:
        extras = extras or [None] * len(event.digests)
        extras[0] = (*(extras[0] or ()), salt_name(salt))
    return tuple(extras)


def _keys_of(extra: bytes) -> tuple[ExtraKey, ...]:
    """Return digest and offset of each image, and what is hashed."""
    return (*((image.digest.hex(), image.start) for image in images_of(extra, 0)), extra)


_DECODER = msgspec.msgpack.Decoder(WireBatch)


def decode(payload: bytes) -> WireBatch:
    """Read a batch, as a consumer does.

    Raises:
        msgspec.DecodeError: It is not one.
    """
    return _DECODER.decode(payload)

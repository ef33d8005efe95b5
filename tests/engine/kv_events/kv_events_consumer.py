"""Somebody else's consumer of KV events, over real sockets.

Its structs are declared as vLLM's documentation tells consumers to declare them, and share
nothing with ours but the format. From the stream alone it knows what is cached, block by block.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ostinato.assembly import PrefixCache
from ostinato.core.identity import PrefixKey
from ostinato.core.tokens import TOKEN_BYTES, pack_tokens
from ostinato.engine.loop.kv_events_publisher import KVEventsPublisher
from ostinato.indexes.block_hash import BlockHasher, sha256
from ostinato.observe.introspection import cached_blocks
from tests.support.cache.cache_views import windows_of

PATIENCE_MS = 20_000
"""Nothing here takes this long; a test that waits so long would wait for ever."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The base of every batch."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """The base of every event."""


class BlockStored(KVCacheEvent):
    """Blocks came."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks went."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """All went."""


class KVEventBatch(EventBatch):
    """What a message carries."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER = msgspec.msgpack.Decoder(KVEventBatch)

Place = tuple[Any, int]
"""Digest (bytes or an integer) and group."""


@dataclass(frozen=True)
class Block:
    """What a consumer knows of a block; the same of every group."""

    parent: Any
    tokens: tuple[int, ...]
    extra: bytes = b""


class Consumer:
    """Listens to a publisher, asks for what it missed, and never guesses.

    Attributes:
        blocks: What is cached.
        next: Number of the batch to come.
        num_replayed: Batches that came from a replay.
        num_starts: How often it had to start over.
        payloads: Everything that it was sent.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", publisher: KVEventsPublisher):
        self.blocks: dict[Place, Block] = {}
        self.next = self.num_replayed = self.num_starts = 0
        self.payloads: list[bytes] = []
        self._live = context.socket(zmq.SUB)
        self._live.connect(publisher.endpoint)
        self._live.subscribe(b"")
        self._replay = context.socket(zmq.DEALER)
        if publisher.replay_endpoint is not None:
            self._replay.connect(publisher.replay_endpoint)

    def poll(self, wait_ms: int = PATIENCE_MS) -> bool:
        """Take one live batch; False if none comes in time."""
        if not self._live.poll(wait_ms):
            return False
        _, number, payload = self._live.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if sequence > self.next and not self.catch_up():
            self.start_over(sequence)
        if sequence == self.next:
            self._take(payload)
        return True

    def listen_until(self, sequence: int) -> None:
        """Take live batches until this one is the next."""
        while self.next < sequence:
            assert self.poll(), f"batch {self.next} never came"

    def ask(self, start: int) -> list[tuple[int, bytes]]:
        """Return what a replay from a number on brings."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        answer = []
        while True:
            assert self._replay.poll(PATIENCE_MS), "no answer"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return answer
            answer.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> bool:
        """Take all batches from the next on; False if there are none."""
        answer = self.ask(self.next)
        for sequence, payload in answer:
            assert sequence == self.next, "a replay with a hole"
            self._take(payload)
        self.num_replayed += len(answer)
        return bool(answer)

    def start_over(self, sequence: int) -> None:
        """Forget everything and learn from the beginning, or else from this batch on."""
        self.blocks.clear()
        self.next = 0
        self.num_starts += 1
        if not self.catch_up():
            self.next = sequence

    def restore(self, sequence: int, payload: bytes) -> None:
        """Forget everything and take a snapshot; ``sequence`` is the batch after it."""
        self.blocks.clear()
        self._take(payload)
        self.next = sequence

    def longest_prefix(self, key: PrefixKey, block_size: int, windows: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt the worker has, with nothing but a hasher."""
        most = (len(key) - 1) // block_size
        digests = BlockHasher(block_size, sha256).digests(key, most)
        end = next((i for i in range(most) if (digests[i], 0) not in self.blocks), most)
        for length in range(end, 0, -1):
            needed = [
                (digests[place], group)
                for group, window in enumerate(windows, 1)
                for place in range(max(0, length * block_size - window + 1) // block_size, length)
            ]
            if all(place in self.blocks for place in needed):
                return length
        return 0

    def _take(self, payload: bytes) -> None:
        """Apply a batch; events that were applied before are skipped."""
        self.payloads.append(payload)
        self.next += 1
        for event in DECODER.decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for digest in event.block_hashes:
                    known = self.blocks.pop((digest, event.group_idx), None)
                    assert known or self.num_starts, "removed, and never stored"
            else:
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for place, digest in enumerate(event.block_hashes):
            extra = (event.extra_keys or {place: None})[place]
            tokens = tuple(event.token_ids[place * size : (place + 1) * size])
            assert (digest, event.group_idx) not in self.blocks, "stored twice"
            block = Block(parent, tokens, b"".join(e for e in extra or () if isinstance(e, bytes)))
            self.blocks[digest, event.group_idx] = block
            parent = digest


def truth(cache: PrefixCache) -> dict[Place, Block]:
    """Return what is cached according to the cache itself: its contents, not its digests."""
    size = cache.block_size * TOKEN_BYTES
    full = [cached for cached in cached_blocks(cache.manager.index) if len(cached.tokens) == size]
    texts = {cached.parent + cached.tokens + cached.extra: cached for cached in full}
    digests: dict[bytes, bytes] = {}
    for text, cached in sorted(texts.items(), key=lambda item: len(item[0])):
        parent = digests.get(cached.parent) or sha256(cached.parent)
        digests[text] = sha256(parent + cached.tokens + cached.extra)
    blocks = {
        (digests[text], 0): Block(digests.get(c.parent), _ids(c.tokens), c.extra)
        for text, c in texts.items()
    }
    for group, window in enumerate(windows_of(cache.manager), 1):
        for copy in window.copies():
            if len(copy.content.name) >= size:
                name = copy.content.name
                blocks[copy.content.digest, group] = Block(None, _ids(name[:size]), name[size:])
    return blocks


def agree(consumer: Consumer, cache: PrefixCache) -> None:
    """Assert that a consumer knows exactly what is cached, with parents and tokens.

    A window's blocks have no parents in the cache, so those are proven by the digest.
    """
    real = truth(cache)
    assert consumer.blocks.keys() == real.keys()
    roots = {sha256(block.identity.encoded) for block in _identities(cache)}
    for (digest, group), block in consumer.blocks.items():
        expected = real[digest, group]
        assert (block.tokens, block.extra) == (expected.tokens, expected.extra)
        assert group or block.parent == expected.parent
        name = pack_tokens(block.tokens).tobytes() + block.extra
        parents = roots if block.parent is None else {block.parent}
        assert digest in {sha256(parent + name) for parent in parents}, "a false parent"


def _identities(cache: PrefixCache) -> list[Any]:
    runs = cache.manager.index.runs()
    roots = {run.entries[0].identity.root for run in runs if run.parent is None}
    held = [copy.content for window in windows_of(cache.manager) for copy in window.copies()]
    return [*held, *(_Named(identity) for identity in roots)]


@dataclass(frozen=True)
class _Named:
    identity: Any


def _ids(packed: bytes) -> tuple[int, ...]:
    return tuple(memoryview(packed).cast("I"))

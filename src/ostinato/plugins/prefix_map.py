"""The small port of prefix indexes, and the index that drives it.

A ``PrefixMap`` knows lists of token ids and block numbers, and decides what is found::

    map.insert([A B C D E F G H], [7, 3])     blocks 7 and 3 hold these tokens
    map.match ([A B C D E F X])               [7]
    map.remove([A B C D E F G H])             forgets the last block of that path: 3

``MapIndex`` keeps everything else that a ``PrefixIndex`` has to keep: one map per identity and
images, an entry per block with its parent, and the holders, which the pool counts.

Rules:

1. What is found is what the map says, as far as it is true: each block is compared with the entry
   of that number. A match ends before the first one that is not the continuation.
2. A block whose content the map has already, by what ``insert`` returns, is a duplicate.
3. A sequence that holds an entry holds its parent.

Source: the interface of SGLang's radix cache (``match_prefix``, ``insert``, ``evict``).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import CachedRun, PrefixMatch, PublishResult, Removal, TailMatch
from ostinato.core.identity import BlockKey, Identity, ImageSpan, PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.plugins.faults import FaultCounter


class PrefixMap(Protocol):
    """The plug-in's map from prefixes to blocks; constructed with the tokens per block."""

    def match(self, tokens: list[int]) -> list[int]:
        """Return the blocks of the longest cached prefix, whole blocks only, in order."""

    def insert(self, tokens: list[int], blocks: list[int]) -> list[int]:
        """Add full blocks of tokens from position 0 on.

        Returns:
            The block that holds each of them from now on: the older one if there was one.
        """

    def remove(self, tokens: list[int]) -> None:
        """Forget the last block of these tokens; nothing cached continues it."""


class TailMap(PrefixMap, Protocol):
    """A map that also finds the first tokens of a block."""

    def tail(self, tokens: list[int]) -> tuple[int, int] | None:
        """Return the block after the whole blocks that agrees longest, and in how many tokens."""

    def seal(self, tokens: list[int], block: int) -> bool:
        """Add a last block that is not full; False if one begins with the same tokens."""


MakeMap = Callable[[int], Any]
"""Makes an empty map from the number of tokens in a block."""

_Scope = tuple[Identity, tuple[ImageSpan, ...]]


class MapEntry(CacheEntry):
    """One block that the map was told of."""

    __slots__ = ("num_children", "parent", "scope", "start", "tokens")

    def __init__(
        self, scope: _Scope, parent: "MapEntry | None", block: int, tokens: bytes, start: int
    ) -> None:
        """Make an entry that one request holds."""
        super().__init__(scope[0], (block,), 1, ref_count=1)
        self.scope, self.parent = scope, parent
        self.tokens, self.start = tokens, start  # packed; place in blocks
        self.num_children = 0

    @property
    def is_leaf(self) -> bool:
        """Whether no cached block continues it."""
        return not self.num_children

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """Return what identifies its block among continuations of its prefix."""
        return BlockKey(self.tokens, (), self.start * block_size)

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the tokens of its block."""
        return self.start + first, b"" if first else self.tokens

    def path_tokens(self) -> list[int]:
        """Return all tokens from position 0 to its end."""
        parts, entry = list[bytes](), self
        while True:
            parts.append(entry.tokens)
            if entry.parent is None:
                return array("I", b"".join(reversed(parts))).tolist()
            entry = entry.parent


@dataclass(slots=True)
class MapPath:
    """What one request holds: the entries of its blocks, in order."""

    scope: _Scope
    entries: list[MapEntry] = field(default_factory=list)


class MapIndex:
    """A prefix index over a ``PrefixMap``."""

    def __init__(self, pool: BlockPool, block_size: int, make_map: MakeMap, name: str) -> None:
        """Make an empty index; faults of the map are logged under a name."""
        self.version, self.block_size = 0, block_size
        self.faults = FaultCounter(name)
        self._pool, self._make_map = pool, make_map
        self._maps: dict[_Scope, Any] = {}
        self._entries: dict[int, MapEntry] = {}  # by block
        self._num_entries: Counter[_Scope] = Counter()

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find what the map finds, as far as it is true (rule 1)."""
        scope, size, entries = _scope(key), self.block_size, list[MapEntry]()
        known = self._maps.get(scope)
        tail: TailMatch | None = None
        if known is not None:
            tokens = key.tokens[:num_tokens].tolist()
            nothing = list[int]()
            places = self.faults.call("match", lambda: list(known.match(tokens)), nothing)
            self._follow(scope, key, places[: num_tokens // size], entries)
            if hasattr(known, "tail"):
                tail = self._tail(known, key, tokens, entries)
        blocks = array("i", [entry.blocks[0] for entry in entries])
        num_shared = len(blocks) * size
        num_hit = num_shared if tail is None else num_shared + tail.num_tokens
        return PrefixMatch(num_shared, num_hit, blocks, tail, entries, 0, key, self, self.version)

    def _follow(
        self, scope: _Scope, key: PrefixKey, blocks: list[int], entries: list[MapEntry]
    ) -> None:
        """Append the entries of blocks while each continues the one before."""
        for place, block in enumerate(blocks):
            entry = self._continuation(scope, entries[-1] if entries else None, key, place, block)
            if entry is None:
                self.faults.note("match", f"returns {blocks!r:.100} for other tokens")
                return
            entries.append(entry)

    def _continuation(
        self, scope: _Scope, parent: MapEntry | None, key: PrefixKey, place: int, block: object
    ) -> MapEntry | None:
        """Return a block's entry if it holds a sequence's block at a place, else None."""
        entry = self._entries.get(block) if isinstance(block, int) else None
        size = self.block_size
        tokens = key.tokens[place * size : (place + 1) * size].tobytes()
        is_it = entry is not None and entry.parent is parent and entry.scope == scope
        return entry if is_it and entry is not None and entry.tokens == tokens else None

    def _tail(
        self, known: Any, key: PrefixKey, tokens: list[int], entries: list[MapEntry]
    ) -> TailMatch | None:
        """Ask the map for a block to copy from, and count the tokens that agree."""
        answer = self.faults.call("tail", lambda: known.tail(tokens), None)
        if answer is None or key.spans:
            return None
        parent, start = entries[-1] if entries else None, len(entries) * self.block_size
        entry = self.faults.call("tail", lambda: self._entries.get(answer[0]), None)
        if entry is None or entry.parent is not parent or entry.scope != _scope(key):
            self.faults.note("tail", f"returns {answer!r:.100}, which does not continue the match")
            return None
        rest = key.tokens[start : len(tokens)].tobytes()
        common = min(num_common_tokens(entry.tokens, rest), self.faults.call(
            "tail", lambda: int(answer[1]), 0))  # fmt: skip
        return TailMatch(BlockId(entry.blocks[0]), common, entry) if common > 0 else None

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[MapPath, MapEntry | None]:
        """Hold the matched entries, and a tail's."""
        path = self._hold(MapPath(_scope(key), list(match.entries)))
        source: MapEntry | None = None if match.tail is None else match.tail.entry
        if source is not None:
            self._pool.acquire((source,))
        return path, source

    def fork(self, path: MapPath) -> MapPath:
        """Hold what a path holds once more."""
        return self._hold(MapPath(path.scope, path.entries[:]))

    def _hold(self, path: MapPath) -> MapPath:
        self._pool.acquire(path.entries)
        return path

    def publish(
        self,
        path: MapPath,
        key: PrefixKey,
        blocks: "array[int]",
        num_tokens: int,
        summary: RequestSummary | None = None,
    ) -> tuple[MapPath, PublishResult]:
        """Tell the map of new blocks; those that it has already are duplicates (rule 2)."""
        known = self._map_of(path.scope)
        if num_tokens % self.block_size:
            return self._seal(known, path, key, blocks[0], num_tokens)
        self.version += 1
        first, tokens = len(path.entries), key.tokens[:num_tokens].tolist()
        own = [*(entry.blocks[0] for entry in path.entries), *blocks]
        holders = self.faults.call("insert", lambda: list(known.insert(tokens, own[:])), own)
        holders = holders if len(holders) == len(own) else own
        policy = self._pool.shares.policy_of(key.identity.owner)
        duplicates, uses, left = list[tuple[int, BlockId]](), 0, 0
        for place, block in enumerate(blocks, first):
            parent = path.entries[-1] if path.entries else None
            entry = self._continuation(path.scope, parent, key, place, holders[place])
            if entry is not None:
                path.entries.append(entry)
                self._pool.acquire((entry,))
                duplicates.append((place, BlockId(entry.blocks[0])))
                continue
            if not left:
                uses, left = policy.recall(key, place, len(own) - place, self.block_size, summary)
            left -= 1
            self._add(path, key, block, (place + 1) * self.block_size).uses = uses + 1
        return path, PublishResult(len(duplicates), tuple(duplicates))

    def _seal(
        self, known: Any, path: MapPath, key: PrefixKey, block: int, num_tokens: int
    ) -> tuple[MapPath, PublishResult]:
        """Offer a partial last block to a map that takes some."""
        tokens = key.tokens[:num_tokens].tolist()
        takes = hasattr(known, "seal") and not key.spans
        if not takes or not self.faults.call("seal", lambda: known.seal(tokens, block), False):
            return path, PublishResult(1)
        self.version += 1
        self._add(path, key, block, num_tokens)
        return path, PublishResult()

    def _add(self, path: MapPath, key: PrefixKey, block: int, end: int) -> MapEntry:
        """Add the entry of a block that ends at a token to a path."""
        parent, place = path.entries[-1] if path.entries else None, len(path.entries)
        tokens = key.tokens[place * self.block_size : end].tobytes()
        entry = MapEntry(path.scope, parent, block, tokens, place)
        entry.born_s = self._pool.now()
        if parent is not None:
            parent.num_children += 1
        self._entries[block] = entry
        self._num_entries[path.scope] += 1
        path.entries.append(entry)
        return entry

    def retract(self, path: MapPath, num_blocks: int) -> tuple[MapPath, Removal]:
        """Take back what a path published last."""
        removed = path.entries[num_blocks:]
        del path.entries[num_blocks:]
        for entry in reversed(removed):
            assert entry.ref_count == 1, "another request holds it"
            entry.ref_count = 0
            self._remove(entry)
        before = BlockId(path.entries[-1].blocks[0]) if path.entries else None
        return path, Removal(array("i", [entry.blocks[0] for entry in reversed(removed)]), before)

    def release(self, path: MapPath, summary: RequestSummary | None = None) -> None:
        """Release a path, tail first."""
        self._pool.release(path.entries[::-1], summary)

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove one idle block."""
        assert isinstance(entry, MapEntry) and not entry.ref_count and entry.is_leaf and max_blocks
        self._remove(entry)
        before = None if entry.parent is None else BlockId(entry.parent.blocks[0])
        return Removal(array("i", entry.blocks), before)

    def _remove(self, entry: MapEntry) -> None:
        """Forget a block, here and in the map."""
        self.version += 1
        known, tokens, parent = self._maps[entry.scope], entry.path_tokens(), entry.parent
        self.faults.call("remove", lambda: known.remove(tokens), None)
        del self._entries[entry.blocks[0]]
        entry.num_blocks = 0
        if parent is not None:
            parent.num_children -= 1
            if parent.is_leaf:
                self._pool.became_leaf(parent)
        self._num_entries[entry.scope] -= 1
        if not self._num_entries[entry.scope]:
            del self._num_entries[entry.scope], self._maps[entry.scope]

    def runs(self) -> Iterator[CachedRun]:
        """Iterate over all blocks, parents first; each is a run."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.start)
        numbers = {id(entry): number for number, entry in enumerate(entries)}
        for entry in entries:
            parent = None if entry.parent is None else numbers[id(entry.parent)]
            yield CachedRun(parent, (entry,))

    def check(self, paths: "list[MapPath]", sources: Sequence[CacheEntry] = ()) -> None:
        """Assert that holders, children and parents agree."""
        entries = list(self._entries.values())
        held = [*sources, *(entry for path in paths for entry in path.entries)]
        self._pool.check_entries(entries, held)
        for entry in entries:
            children = sum(other.parent is entry for other in entries)
            assert children == entry.num_children, "miscounted children"
            assert entry.parent is None or entry.parent in entries, "the parent is not cached"
            full = len(entry.tokens) == self.block_size * TOKEN_BYTES
            assert full or entry.is_leaf, "a partial block with children"

    def _map_of(self, scope: _Scope) -> Any:
        if scope not in self._maps:
            self._maps[scope] = self._make_map(self.block_size)
        return self._maps[scope]


def _scope(key: PrefixKey) -> _Scope:
    """Return what two sequences must agree on to share a map."""
    return key.identity, key.images

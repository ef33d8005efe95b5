"""How are prefixes found by chained digest?

A map from digest to content, as in vLLM: a match hashes block after block and stops at the
first digest that is not there. Digests may collide by malice or bad luck, so each candidate's
parent and tokens are compared as well; by induction a hit is exact whatever the digest.

Rules:

1. A ``Content`` is one block's worth of prefix; it lives while it has a copy.
2. Block tables are append-only: a second block of the same content becomes another copy. A
   match returns the oldest; when that is evicted, the next one serves.
3. A copy's reference count is the number of live paths through it. Idle copies, and they
   alone, are in the eviction policy.
4. A content's parent lives at least as long: holders of a copy hold a copy of the parent.

Source: vLLM's automatic prefix caching design.
"""

from array import array
from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_hash import BlockHasher
from ostinato.cache.hash_content import Content, Copy, HashPath
from ostinato.cache.hash_walk import cached_blocks, cached_runs, check
from ostinato.cache.policies.contract import Recall, Turn
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import (
    CachedBlock,
    CachedRun,
    Forgotten,
    PrefixMatch,
    Publication,
    TailMatch,
)
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId


class HashIndex:
    """A map from chained digests to contents."""

    def __init__(
        self, pool: BlockPool, hasher: BlockHasher, outside: BlockHasher | None = None
    ) -> None:
        """Make an empty index over a pool.

        Args:
            pool: Whose blocks it lists.
            hasher: Finds contents.
            outside: Names contents to outsiders; None if nobody listens.
        """
        self._pool = pool
        self._hasher = hasher
        self._outside = outside
        self._block_size = hasher.block_size
        self._contents: dict[BlockDigest, list[Content]] = {}
        self._roots: dict[Identity, Content] = {}
        self._root_uses: dict[Identity, int] = {}

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        Cost: one digest and one comparison per block that hits.
        """
        content, blocks = self._roots.get(key.identity.root), array("i")
        if content is None:
            return PrefixMatch(self._block_size)
        copies: list[Copy] = []
        for index in range(num_tokens // self._block_size):
            child = self._find(content, key, index)
            if child is None:
                break
            content = child
            copies.append(child.copies[0])
            blocks.append(child.copies[0].block)
        tail = self._match_tail(key, num_tokens, content, len(blocks))
        return PrefixMatch(self._block_size, blocks, tail, cursor=copies)

    def _find(self, parent: Content, key: PrefixKey, index: int) -> Content | None:
        """Look a block up by digest; compare parent and tokens, whatever the digest says."""
        digest = self._hasher.digests(key, index + 1)[index]
        for content in self._contents.get(digest, ()):
            if content.parent is parent and content.name == self._hasher.block(key, index):
                return content
        return None

    def _match_tail(
        self, key: PrefixKey, num_tokens: int, parent: Content, num_blocks: int
    ) -> TailMatch | None:
        """Find the block behind a match that begins most like the sequence goes on."""
        start = num_blocks * self._block_size
        stop = min(num_tokens, start + self._block_size)
        stop = start + key.num_text_tokens(start, stop)
        best = parent.children.most_alike(key.packed_range(start, stop)) if stop > start else None
        if best is None:
            return None
        content, common = best
        copy = content.copies[0]
        return TailMatch(copy.block, common, copy)

    def tail_name(self, tail: TailMatch) -> bytes:
        """Return the packed tokens and extras of a tail's block."""
        content: Content = tail.entry.content
        return content.name or content.text

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that nobody holds, in O(blocks)."""
        return sum(not copy.ref_count for copy in match.cursor or ())

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[HashPath, HashPath | None]:
        """Hold the matched copies, and apart from them a tail's."""
        path = self._hold_path(HashPath(self._root(key), list(match.cursor or ())))
        if match.tail is None:
            return path, None
        copy: Copy = match.tail.entry
        if not copy.ref_count:
            self._pool.hold(copy)
        copy.ref_count += 1
        return path, HashPath(copy.content, [copy])

    def release_tail(self, tail: HashPath) -> None:
        """Let go of the source block."""
        [copy] = tail.copies
        copy.ref_count -= 1
        if not copy.ref_count:
            self._pool.idle(copy)

    def count_hit(self, path: HashPath) -> None:
        """Note that a request's hit ended where this path ends."""
        path.last.num_hits += 1

    def last_entry(self, path: HashPath) -> Copy | None:
        """Return the deepest entry that a path holds; None if it holds none."""
        return path.copies[-1] if path.copies else None

    def fork(self, path: HashPath) -> HashPath:
        """Hold what a path holds once more."""
        return self._hold_path(HashPath(path.root, path.copies[:]))

    def publish(
        self, path: HashPath, key: PrefixKey, blocks: "array[int]", turn: Turn | None = None
    ) -> tuple[HashPath, Publication]:
        """Add copies; a content that is new gets its digest."""
        num_known, now = 0, self._pool.now()
        known = Recall(0)
        left = 0  # blocks that ``known`` is still true of
        last = len(path.copies) + len(blocks)
        for block in blocks:
            parent, index = path.last, len(path.copies)
            content = self._find(parent, key, index)
            if content is None:
                content = self._add(parent, key, index)
                if not left:
                    known = self._pool.past.recall(key, index, last - index, self._block_size, turn)
                    left = known.num_blocks
                left -= 1
            else:
                num_known += 1
            copy = Copy(BlockId(block), content)
            copy.ref_count = 1
            copy.born_s = now
            content.copies.append(copy)
            if len(content.copies) == 1:
                copy.uses = known.uses + 1
            elif len(content.copies) == 2:
                self._pool.expose(content.copies[0])  # what builds on it has another one
            path.copies.append(copy)
        return path, Publication(num_known)

    def retract(self, path: HashPath, num_blocks: int) -> tuple[HashPath, Forgotten]:
        """Remove the copies that a path published last."""
        dropped = path.copies[num_blocks:][::-1]
        del path.copies[num_blocks:]
        digests: list[BlockDigest] = []
        for copy in dropped:
            assert copy.ref_count == 1, "somebody holds it"
            copy.ref_count = 0
            digests += self._forget(copy)
        blocks = array("i", [copy.block for copy in dropped])
        return path, Forgotten(blocks, tuple(digests))

    def seal(
        self,
        path: HashPath,
        key: PrefixKey,
        block: BlockId,
        num_tokens: int,
    ) -> Copy | None:
        """Add a content with fewer tokens than a block and no digest."""
        start = len(path.copies) * self._block_size
        if key.num_text_tokens(start, num_tokens) < num_tokens - start:
            return None  # only text is shared token by token
        text = key.packed_range(start, num_tokens)
        best = path.last.children.most_alike(text)
        if best is not None and best[1] == num_tokens - start:
            return None
        content = Content(path.last, None, None, text, key.identity)
        copy = Copy(block, content)
        content.copies.append(copy)
        path.last.children.add(None, text, content)
        self._pool.adopt(copy)
        return copy

    def release(
        self, path: HashPath, turn: Turn | None = None, tail: CacheEntry | None = None
    ) -> None:
        """Let go of a path, tail first, in O(blocks)."""
        idle = [] if tail is None else [tail]
        for copy in reversed(path.copies):
            count = copy.ref_count = copy.ref_count - 1
            assert count >= 0, "released more often than acquired"
            if not count:
                idle.append(copy)
        if idle:
            self._pool.idle_all(idle, turn)
        self._root_uses[path.root.identity] -= 1
        self._drop_empty_root(path.root)

    def quote(self, path: HashPath) -> None:
        """Have no tokens in a row: each block's are its content's."""

    def evict(self, entry: CacheEntry, most: int) -> Forgotten:
        """Forget one idle copy."""
        assert isinstance(entry, Copy) and not entry.ref_count and entry.is_leaf and most
        self._pool.shrink(entry, 1)
        digests = self._forget(entry)
        return Forgotten(array("i", [entry.block]), digests)

    def contents(self) -> Iterator[CachedBlock]:
        """Walk every published block."""
        return cached_blocks(self._roots, self._block_size)

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published, block by block; copies of one content are one run."""
        return cached_runs(self._roots, self._block_size)

    def check(self, paths: "list[HashPath]", tails: "Sequence[HashPath]" = ()) -> None:
        """Assert rules 1 to 4 and that digests and links agree."""
        idle = {id(entry) for entry in self._pool.entries()}
        check(self._roots, self._contents, idle, (*paths, *tails))
        for identity, root in self._roots.items():
            held = sum(path.root is root for path in paths)
            assert self._root_uses[identity] == held, "a root's uses are miscounted"
            assert held or root.children, "an empty root was left behind"

    def _add(self, parent: Content, key: PrefixKey, index: int) -> Content:
        """Note a content that is new."""
        start, stop = index * self._block_size, (index + 1) * self._block_size
        text = key.packed_range(start, start + key.num_text_tokens(start, stop))
        name, digest = self._hasher.block(key, index), self._hasher.digests(key, index + 1)[index]
        content = Content(parent, digest, name, text, key.identity)
        if self._outside is not None:
            content.outside = self._outside.digests(key, index + 1)[index]
        self._contents.setdefault(digest, []).append(content)
        parent.children.add(name, text, content)
        return content

    def _forget(self, copy: Copy) -> tuple[BlockDigest, ...]:
        """Take a copy out of its content; the last one takes the content along (rule 1).

        Returns:
            The content's name to outsiders if it is gone and has one.
        """
        content = copy.content
        content.copies.remove(copy)
        if content.copies:
            return ()
        parent = content.parent
        assert parent is not None and not content.children
        parent.num_hits += content.num_hits
        parent.children.remove(content.name, content.text, content)
        if content.digest is not None:
            namesakes = self._contents[content.digest]
            namesakes.remove(content)
            if not namesakes:
                del self._contents[content.digest]
        if not parent.children:
            for idle in parent.copies:
                self._pool.expose(idle)
        self._drop_empty_root(parent)
        return () if content.outside is None else (content.outside,)

    def _root(self, key: PrefixKey) -> Content:
        identity = key.identity.root
        root = self._roots.get(identity)
        if root is None:
            root = Content(None, self._hasher.root(key), None, b"", identity)
            self._roots[identity] = root
            self._root_uses[identity] = 0
        return root

    def _drop_empty_root(self, content: Content) -> None:
        identity = content.identity
        is_root = content.parent is None
        if is_root and not content.children and not self._root_uses[identity]:
            del self._roots[identity], self._root_uses[identity]

    def _hold_path(self, path: HashPath) -> HashPath:
        self._root_uses[path.root.identity] += 1
        self._pool.hold_all([copy for copy in path.copies if not copy.ref_count])
        for copy in path.copies:
            copy.ref_count += 1
        return path

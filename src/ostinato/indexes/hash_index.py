"""Prefix index by chained digest.

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
from ostinato.cache.eviction import Recall, RequestSummary
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import (
    CachedBlock,
    CachedRun,
    PrefixMatch,
    PublishResult,
    Removal,
    TailMatch,
)
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId
from ostinato.indexes.hash_content import Content, Copy, HashPath
from ostinato.indexes.hash_walk import cached_blocks, cached_runs, check


class HashIndex:
    """A map from chained digests to contents."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher) -> None:
        """Make an empty index over a pool, whose contents are found by a hasher's digests."""
        self.version = 0
        self._pool = pool
        self._hasher = hasher
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
            return PrefixMatch(self._block_size, blocks, key=key, index=self, version=self.version)
        copies: list[Copy] = []
        for index in range(num_tokens // self._block_size):
            child = self._find(content, key, index)
            if child is None:
                break
            content = child
            copies.append(child.copies[0])
            blocks.append(child.copies[0].block)
        tail = self._match_tail(key, num_tokens, content, len(blocks))
        return PrefixMatch(self._block_size, blocks, tail, copies, key, self, self.version)

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
        best = (
            parent.children.longest_common_prefix(key.packed_range(start, stop))
            if stop > start
            else None
        )
        if best is None:
            return None
        content, common = best
        copy = content.copies[0]
        return TailMatch(copy.block, common, copy)

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that no request holds, in O(blocks)."""
        return sum(not copy.ref_count for copy in match.cursor or ())

    def acquire(
        self, key: PrefixKey, match: PrefixMatch, summary: RequestSummary | None = None
    ) -> tuple[HashPath, HashPath | None]:
        """Hold the matched copies, and apart from them a tail's."""
        path = self._hold_path(HashPath(self._root(key), list(match.cursor or ())))
        last = path.copies[-1] if path.copies else None
        if summary is not None and last is not None and last.idle_tick:
            self._pool.note_gap(summary, last.uses, last.idle_since_s)
        if match.tail is None:
            return path, None
        copy: Copy = match.tail.entry
        if not copy.ref_count:
            self._pool.mark_used((copy,))
        copy.ref_count += 1
        return path, HashPath(copy.content, [copy])

    def release_tail(self, tail: HashPath) -> None:
        """Let go of the source block."""
        [copy] = tail.copies
        copy.ref_count -= 1
        if not copy.ref_count:
            self._pool.mark_evictable((copy,))

    def fork(self, path: HashPath) -> HashPath:
        """Hold what a path holds once more."""
        return self._hold_path(HashPath(path.root, path.copies[:]))

    def publish(
        self,
        path: HashPath,
        key: PrefixKey,
        blocks: "array[int]",
        summary: RequestSummary | None = None,
    ) -> tuple[HashPath, PublishResult]:
        """Add copies; a content that is new gets its digest."""
        first, last = len(path.copies), len(path.copies) + len(blocks)
        self._hasher.digests(key, last)  # whatever it raises, nothing has changed
        num_known, now_s = 0, self._pool.now()
        known, left = Recall(0), 0  # blocks that ``known`` is still true of
        self.version += 1
        for index, block in enumerate(blocks, first):
            parent, uses = path.last, 1
            content = self._find(parent, key, index)
            if content is None:
                content = self._add(parent, key, index)
                if self._pool.learns and not left:
                    known = self._pool.recall(key, index, last - index, self._block_size, summary)
                    left = known.num_blocks
                left, uses = left - 1, known.uses + 1
            else:
                num_known += 1
            copy = Copy(BlockId(block), content)
            copy.ref_count, copy.born_s, copy.uses = 1, now_s, uses
            content.copies.append(copy)
            if len(content.copies) == 2:
                self._pool.expose(content.copies[0])  # what builds on it has another one
            path.copies.append(copy)
        return path, PublishResult(num_known)

    def orphans(self, path: HashPath, num_blocks: int) -> Sequence[Copy]:
        """List the copies below a content that the path alone still has a copy of."""
        own = path.copies[num_blocks:]
        last = next((copy.content for copy in own if len(copy.content.copies) == 1), None)
        stack, found = [] if last is None else [last], list[Copy]()
        while stack:
            content = stack.pop()
            found += [copy for copy in content.copies if copy not in own]
            stack += content.children
        return found[::-1]

    def retract(self, path: HashPath, num_blocks: int) -> tuple[HashPath, Removal]:
        """Remove the copies that a path published last."""
        removed = path.copies[num_blocks:][::-1]
        del path.copies[num_blocks:]
        self.version += 1
        before: BlockId | None = None
        for copy in removed:
            assert copy.ref_count == 1, "another request holds it"
            copy.ref_count = 0
            before = self._remove(copy)
        return path, Removal(array("i", [copy.block for copy in removed]), before)

    def publish_partial(
        self, path: HashPath, key: PrefixKey, block: BlockId, num_tokens: int
    ) -> Copy | None:
        """Add a content with fewer tokens than a block and no digest."""
        start = len(path.copies) * self._block_size
        if key.num_text_tokens(start, num_tokens) < num_tokens - start:
            return None  # only text is shared token by token
        text = key.packed_range(start, num_tokens)
        best = path.last.children.longest_common_prefix(text)
        if best is not None and best[1] == num_tokens - start:
            return None
        self.version += 1
        content = Content(path.last, None, None, text, key.identity)
        copy = Copy(block, content)
        content.copies.append(copy)
        path.last.children.add(None, text, content)
        self._pool.stamp(copy)
        return copy

    def release(
        self,
        path: HashPath,
        summary: RequestSummary | None = None,
        partial: CacheEntry | None = None,
    ) -> None:
        """Release a path, tail first, in O(blocks)."""
        idle = [] if partial is None else [partial]
        for copy in reversed(path.copies):
            count = copy.ref_count = copy.ref_count - 1
            assert count >= 0, "released more often than acquired"
            if not count:
                idle.append(copy)
        if idle:
            self._pool.mark_evictable(idle, summary)
        self._root_uses[path.root.identity] -= 1
        self._drop_empty_root(path.root)

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove one idle copy."""
        assert isinstance(entry, Copy) and not entry.ref_count and entry.is_leaf and most
        self.version += 1
        self._pool.shrink(entry, 1)
        return Removal(array("i", [entry.block]), self._remove(entry))

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
        self._contents.setdefault(digest, []).append(content)
        parent.children.add(name, text, content)
        return content

    def _remove(self, copy: Copy) -> BlockId | None:
        """Take a copy out of its content; the last one takes the content with it (rule 1).

        Returns:
            Another copy of it, or one of the content before it; None at position 0.
        """
        content = copy.content
        content.copies.remove(copy)
        if content.copies:
            return content.copies[0].block
        parent = content.parent
        assert parent is not None and not content.children
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
        return parent.copies[0].block if parent.copies else None

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
        idle = [copy for copy in path.copies if not copy.ref_count]
        if idle:
            self._pool.mark_used(idle)
        for copy in path.copies:
            copy.ref_count += 1
        return path

"""Prefix index by chained digest.

A map from digest to content, as in vLLM: a match hashes block after block and stops at the
first digest that is not there. Digests may collide by malice or bad luck, so each candidate's
parent and tokens are compared as well; by induction a hit is exact with any digest.

::

    content   tokens of one block, after its parent's    one per prefix
    └── copies   7, 12                                   one per block that holds it, oldest first
    path      a root, and a copy per block               one per request

Rules:

1. A ``CachedContent`` is one block's worth of prefix; it lives while it has a copy.
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
from ostinato.cache.child_index import walk
from ostinato.cache.eviction import RequestSummary
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import CachedRun, PrefixMatch, PublishResult, Removal, TailMatch
from ostinato.core.identity import BlockKey, Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId
from ostinato.indexes.block_copy import CachedContent, HashCopy, HashPath
from ostinato.indexes.block_hash import BlockHasher


class HashIndex:
    """A map from chained digests to contents."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, keeps_copies: bool = True) -> None:
        """Make an empty index over a pool.

        Args:
            pool: Its blocks.
            hasher: Digests that contents are found by.
            keeps_copies: Whether rule 2 holds; otherwise a second block of the same content is a
                duplicate, as in the radix index.
        """
        self._keeps_copies = keeps_copies
        self.version, self.block_size = 0, hasher.block_size
        self._pool = pool
        self._hasher = hasher
        self._contents: dict[BlockDigest, list[CachedContent]] = {}
        self._roots: dict[Identity, CachedContent] = {}

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        Cost: one digest and one comparison per block that hits.
        """
        size, blocks = self.block_size, array("i")
        content, copies = self._roots.get(key.identity.root), list[HashCopy]()
        if content is None:
            return PrefixMatch(0, 0, blocks, None, copies, 0, key, self, self.version)
        for index in range(num_tokens // size):
            child = self._find(content, key, index)
            if child is None:
                break
            content = child
            copies.append(child.copies[0])
            blocks.append(child.copies[0].block)
        num_shared = len(blocks) * size
        tail = self._tail(content, key, num_shared, num_tokens)
        num_hit = num_shared if tail is None else num_shared + tail.num_tokens
        return PrefixMatch(num_shared, num_hit, blocks, tail, copies, 0, key, self, self.version)

    def _tail(
        self, content: CachedContent, key: PrefixKey, start: int, num_tokens: int
    ) -> TailMatch | None:
        """Find the block after a match with the longest common prefix with the sequence."""
        stop = min(num_tokens, start + self.block_size)
        run = key.tokens[start:stop].tobytes()
        name = key.child_name(start, stop)[: len(run)] if key.spans else run
        child, common = content.children.closest(name)
        if child is None:
            return None
        if key.spans or child.key.spans:
            common = key.block_key(start, stop).num_common_tokens(child.key)
        return TailMatch(child.copies[0].block, common, child.copies[0]) if common else None

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[HashPath, HashCopy | None]:
        """Hold the matched copies, and apart from them a tail's."""
        identity = key.identity.root
        root = self._roots.get(identity)
        if root is None:
            nothing = BlockKey(b"", (), 0)
            root = self._roots[identity] = CachedContent(None, None, nothing, identity)
        path = self._hold(HashPath(root, list(match.entries)))
        source: HashCopy | None = None if match.tail is None else match.tail.entry
        if source is not None:
            self._pool.acquire((source,))
        return path, source

    def fork(self, path: HashPath) -> HashPath:
        """Hold what a path holds once more."""
        return self._hold(HashPath(path.root, path.copies[:]))

    def publish(
        self,
        path: HashPath,
        key: PrefixKey,
        blocks: "array[int]",
        num_tokens: int,
        summary: RequestSummary | None = None,
    ) -> tuple[HashPath, PublishResult]:
        """Add copies; a content that is new gets its digest."""
        if num_tokens % self.block_size:
            return self._publish_partial(path, key, blocks[0], num_tokens)
        first, last = len(path.copies), len(path.copies) + len(blocks)
        self._hasher.digests(key, last)  # if it raises, nothing has changed
        policy, now_s = self._pool.shares.policy_of(key.identity.owner), self._pool.now()
        num_known, duplicates = 0, list[tuple[int, BlockId]]()
        uses, left = 0, 0  # what is remembered, and of how many more blocks
        self.version += 1
        for index, block in enumerate(blocks, first):
            content = self._find(path.last, key, index)
            if content is None:
                if not left:
                    uses, left = policy.recall(key, index, last - index, self.block_size, summary)
                left -= 1
                content = self._add(path.last, key, index)
                path.copies.append(HashCopy(block, content, now_s, uses + 1))
                continue
            num_known += 1
            canonical: HashCopy = content.copies[0]
            if self._keeps_copies:
                path.copies.append(HashCopy(block, content, now_s))
                if len(content.copies) == 2:
                    self._pool.became_leaf(canonical)  # what builds on it has another one
            else:
                path.copies.append(canonical)
                self._pool.acquire((canonical,))
                duplicates.append((index, canonical.block))
        return path, PublishResult(num_known, tuple(duplicates))

    def retract(self, path: HashPath, num_blocks: int) -> tuple[HashPath, Removal]:
        """Remove the copies that a path published last.

        Where one of them is the last copy of known content, because the first was evicted in the
        same step, nothing leads to what builds on it any more: that is evicted first.
        """
        removed = path.copies[num_blocks:]
        for orphan in self._orphans(removed):
            self._pool.evict(orphan, "space", self)
        del path.copies[num_blocks:]
        self.version += 1
        before: BlockId | None = None
        for copy in reversed(removed):
            assert copy.ref_count == 1, "another request holds it"
            copy.ref_count = 0
            before = self._remove(copy)
        return path, Removal(array("i", [copy.block for copy in reversed(removed)]), before)

    def release(self, path: HashPath, summary: RequestSummary | None = None) -> None:
        """Release a path, tail first, in O(blocks)."""
        self._pool.release(path.copies[::-1], summary)
        path.root.num_paths -= 1
        self._became_leaf(path.root)

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove one idle copy."""
        assert isinstance(entry, HashCopy) and not entry.ref_count and entry.is_leaf and max_blocks
        self.version += 1
        return Removal(array("i", [entry.block]), self._remove(entry))

    def runs(self) -> Iterator[CachedRun]:
        """Iterate over all contents but the roots; the copies of one are one run."""
        return (CachedRun(parent, content.copies) for parent, content in walk(self._roots.values()))

    def check(self, paths: "list[HashPath]", sources: Sequence[CacheEntry] = ()) -> None:
        """Assert rules 1 to 4 and that digests and links agree."""
        contents = [content for _, content in walk(self._roots.values())]
        copies = [copy for content in contents for copy in content.copies]
        self._pool.check_entries(
            copies, [*sources, *(copy for path in paths for copy in path.copies)]
        )
        for content in contents:
            parent = content.parent
            assert content.copies and parent is not None, "a content without a copy"
            parted = parent.copies and parent.identity.tenant != content.identity.tenant
            is_held = any(copy.ref_count for copy in parent.copies)
            assert not parted or is_held, "an idle public prefix has content after it"
            assert content.digest is not None or not content.children, "a partial block as parent"
            known = self._contents.get(content.digest, []) if content.digest else [content]
            assert content in known, "a content has lost its digest"
        num_named = sum(content.digest is not None for content in contents)
        assert sum(map(len, self._contents.values())) == num_named
        for root in self._roots.values():
            num_paths = sum(path.root is root for path in paths)
            assert root.num_paths == num_paths, "a root's paths are miscounted"
            assert num_paths or root.children, "an empty root was left behind"

    def _find(self, parent: CachedContent, key: PrefixKey, index: int) -> CachedContent | None:
        """Look a block up by digest; parent and tokens are compared as well."""
        digest = self._hasher.digests(key, index + 1)[index]
        for content in self._contents.get(digest, ()):
            if content.parent is parent and content.name == self._hasher.name(key, index):
                return content
        return None

    def _hold(self, path: HashPath) -> HashPath:
        """Count one more holder of a path's copies."""
        path.root.num_paths += 1
        self._pool.acquire(path.copies)
        return path

    def _add(self, parent: CachedContent, key: PrefixKey, index: int) -> CachedContent:
        """Add a content that is new."""
        own = key.block_key(index * self.block_size, (index + 1) * self.block_size)
        digest = self._hasher.digests(key, index + 1)[index]
        identity, _ = key.identity.of_block(index, self.block_size)
        content = CachedContent(parent, digest, own, identity)
        self._contents.setdefault(digest, []).append(content)
        parent.children.add(own.child_name, content)
        return content

    def _publish_partial(
        self, path: HashPath, key: PrefixKey, block: int, num_tokens: int
    ) -> tuple[HashPath, PublishResult]:
        """Add a content with fewer tokens than a block and no digest."""
        parent = path.last
        own = key.block_key(len(path.copies) * self.block_size, num_tokens)
        if own.spans or parent.children.begins_with(own.tokens):
            return path, PublishResult(1)
        self.version += 1
        content = CachedContent(parent, None, own, key.identity)
        parent.children.add(own.tokens, content)
        path.copies.append(HashCopy(block, content, self._pool.now(), 1))
        return path, PublishResult()

    def _orphans(self, removed: list[HashCopy]) -> list[HashCopy]:
        """List what only copies that are about to be removed lead to, descendants first."""
        last = next((copy.content for copy in removed if len(copy.content.copies) == 1), None)
        stack, copies = [] if last is None else [last], list[HashCopy]()
        while stack:
            content = stack.pop()
            copies += [copy for copy in content.copies if copy not in removed]
            stack += content.children
        return copies[::-1]

    def _remove(self, copy: HashCopy) -> BlockId | None:
        """Take a copy out of its content; the last one takes the content with it (rule 1).

        Returns:
            Another copy of it, or one of the content before it; None at position 0.
        """
        content = copy.content
        copies: list[HashCopy] = content.copies
        copy.remove()
        if copies:
            return copies[0].block
        parent = content.parent
        assert parent is not None and not content.children
        parent.children.remove(content.key.child_name)
        if content.digest is not None:
            same_digest = self._contents[content.digest]
            same_digest.remove(content)
            if not same_digest:
                del self._contents[content.digest]
        self._became_leaf(parent)
        above: list[HashCopy] = parent.copies
        return above[0].block if above else None

    def _became_leaf(self, content: CachedContent) -> None:
        """Tell the policy if a content has no children left; remove a root without any."""
        if content.parent is None and not content.children and not content.num_paths:
            del self._roots[content.identity]
        for copy in () if content.children else content.copies:
            self._pool.became_leaf(copy)

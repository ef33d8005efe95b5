"""Walks over the hash index: for pictures, surveys and checks."""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from ostinato.cache.prefix_index import CachedBlock, CachedRun
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockDigest
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.indexes.hash_content import Content, HashPath

Roots = Mapping[Identity, Content]


def walk(roots: Roots) -> Iterator[tuple[Content, bytes]]:
    """Walk all contents but the roots, each with the packed blocks before it."""
    stack = [
        (child, identity.encoded) for identity, root in roots.items() for child in root.children
    ]
    while stack:
        content, before = stack.pop()
        yield content, before
        stack += [(child, before + (content.name or b"")) for child in content.children]


def cached_blocks(roots: Roots, block_size: int) -> Iterator[CachedBlock]:
    """Walk every published block."""
    size = block_size * TOKEN_BYTES
    for content, before in walk(roots):
        name = content.text if content.name is None else content.name
        for copy in content.copies:
            yield CachedBlock(copy.block, name[:size], copy.ref_count, before, name[size:])


def cached_runs(roots: Roots, block_size: int) -> Iterator[CachedRun]:
    """Walk everything published, block by block; copies of one content are one run.

    Cost: O(blocks) steps in Python.
    """
    size, number = block_size * TOKEN_BYTES, 0
    stack: list[tuple[Content, int | None]] = [
        (child, None) for root in roots.values() for child in root.children
    ]
    while stack:
        content, parent = stack.pop()
        tokens = content.text if content.name is None else content.name[:size]
        held = array("i", [copy.block for copy in content.copies if copy.ref_count])
        idle = array("i", [copy.block for copy in content.copies if not copy.ref_count])
        holders = sum(copy.ref_count for copy in content.copies)
        born_s = content.copies[0].born_s
        yield CachedRun(
            number, parent, content.identity, tokens, held, idle,
            holders, born_s,
        )  # fmt: skip
        stack += [(child, number) for child in content.children]
        number += 1


def check(
    roots: Roots,
    by_digest: Mapping[BlockDigest, Sequence[Content]],
    idle: set[int],
    paths: Sequence[HashPath],
) -> None:
    """Assert the index's rules 1 to 4 and that digests and links agree.

    Args:
        roots: The contents that all others continue.
        by_digest: All contents with a digest.
        idle: ``id`` of every entry that the pool can evict.
        paths: Every live path and every tail that is held.
    """
    counted: dict[int, int] = {}
    for path in paths:
        for copy in path.copies:
            counted[id(copy)] = counted.get(id(copy), 0) + 1
    contents = [content for content, _ in walk(roots)]
    copies = [copy for content in contents for copy in content.copies]
    for copy in copies:
        assert copy.ref_count == counted.pop(id(copy), 0), "references are miscounted"
        assert (id(copy) in idle) == (copy.ref_count == 0), "idle copies alone are evictable"
    assert not counted, "a path holds a copy outside the index"
    assert len(idle) == sum(copy.ref_count == 0 for copy in copies), "a lost copy is evictable"
    for content in contents:
        assert content.copies, "a content without a copy"
        parent = content.parent
        parted = parent is not None and parent.copies and parent.identity != content.identity
        held_head = parent is not None and any(copy.ref_count for copy in parent.copies)
        assert not parted or held_head, "content behind a public prefix that may go"
        assert content.name is not None or not content.children, "a sealed tail goes on"
        known = by_digest.get(content.digest, []) if content.digest else [content]
        assert content in known, "a content has lost its digest"
    assert sum(map(len, by_digest.values())) == sum(c.digest is not None for c in contents)

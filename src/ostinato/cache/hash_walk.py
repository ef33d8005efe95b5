"""What lies in the hash index, from the roots on? For pictures, surveys and checks."""

from array import array
from collections.abc import Iterator, Mapping

from ostinato.cache.hash_content import Content
from ostinato.cache.prefix_index import CachedBlock, CachedRun
from ostinato.core.identity import Identity
from ostinato.core.tokens import TOKEN_BYTES

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
            holders, content.num_hits, born_s,
        )  # fmt: skip
        stack += [(child, number) for child in content.children]
        number += 1

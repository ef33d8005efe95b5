"""What do all groups hold, and does it add up? For checks, pictures and erasure."""

from collections.abc import Iterable, Iterator, Sequence

from ostinato.cache.block_table import BlockTable
from ostinato.cache.groups import Groups
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES


def check(groups: Groups, tables: Iterable[BlockTable]) -> None:
    """Assert every invariant of pools, index and windows."""
    tables = list(tables)
    groups.pool.check()
    paths = [table.path for table in tables if table.path is not None]
    tails = [table.tail_path for table in tables if table.tail_path is not None]
    groups.index.check(paths, tails)
    cached: list[int] = [block.block for block in groups.index.contents()]
    private = [block for table in tables for block in table.private_blocks]
    scratch: list[int] = list(groups.pool.scratch)
    owned = sorted(cached + private + scratch)
    assert owned == list(range(groups.config.num_blocks)), "a block has two owners or none"
    for table in tables:
        assert len(set(table.blocks)) == len(table.blocks), "a block twice in a table"
    for number, window in enumerate(groups.windows):
        window.check([table.windows[number] for table in tables])
    if not tables:
        for allocator in groups.allocators:
            pool = allocator.pool
            assert pool.num_free == pool.num_blocks, "blocks leaked (law 9)"


def live_slots(groups: Groups, tables: Iterable[BlockTable]) -> "Iterator[dict[int, int]]":
    """Say, group by group, which blocks have content and how many tokens of it."""
    tables = list(tables)
    size = groups.block_size
    live: dict[int, int] = {c.block: len(c.tokens) // TOKEN_BYTES for c in groups.index.contents()}
    private = {
        block: table.num_planned - place * size
        for table in tables
        for place, block in enumerate(table.blocks)
        if block not in live
    }
    yield {**live, **_clamped(private, size)}
    for number, window in enumerate(groups.windows):
        live = {c.block: c.content.num_tokens for c in window.copies()}
        private = {
            block: table.num_planned - place * size
            for table in tables
            for place, block in enumerate(table.windows[number].blocks)
            if block not in live and block != window.null_block
        }
        yield {**live, **_clamped(private, size)}


def describe(groups: Groups, tables: Sequence[BlockTable]) -> str:
    """Return the whole state as text, one line per block of group 0 and per live table."""
    contents = {cached.block: cached for cached in groups.index.contents()}
    lines = [f"free order: {list(groups.pool.free_order())}"]
    for block in range(groups.config.num_blocks):
        cached = contents.get(BlockId(block))
        lines.append(f"block {block}: {'no content' if cached is None else cached}")
    return "\n".join([*lines, *(f"table {table}" for table in tables)])


def _clamped(tokens: dict[int, int], most: int) -> dict[int, int]:
    return {block: max(0, min(count, most)) for block, count in tokens.items()}

"""The whole state of a cache as text, to compare before and after a call."""

from ostinato.cache.manager import CacheManager
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Contents


def whole_state(manager: CacheManager) -> str:
    """Return each pool's order of free blocks, and a line per block and per table."""
    pairs = zip(manager.pools, manager.contents, strict=True)
    lines = [line for pool, contents in pairs for line in _pool_state(manager, pool, contents)]
    tables = manager.tables
    lines += [f"table {table}" for table in [*tables.live.values(), *tables.pinned.values()]]
    lines += [f"in step: {table.table_id} {forked}" for table, forked in tables.step.items()]
    return "\n".join([*lines, f"epoch {manager.epoch}", f"states {manager.state_copies}"])


def _pool_state(manager: CacheManager, pool: BlockPool, contents: Contents) -> list[str]:
    lines = {block: "no content" for block in range(pool.num_blocks)}
    for run in contents.runs():
        for entry in run.entries:
            for place, block in enumerate(entry.blocks):
                name = entry.block_key(place, manager.block_size).name
                lines[block] = f"{name!r} after run {run.parent}, {entry.ref_count} holders"
    blocks = [f"block {block}: {line}" for block, line in lines.items()]
    return [f"free order: {[*pool.free_order()]}", *blocks]

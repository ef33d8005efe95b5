"""The whole state of a cache as text, to compare before and after a call."""

from ostinato.cache.manager import CacheManager


def whole_state(manager: CacheManager) -> str:
    """Return the order of free blocks, and one line per block and per live table."""
    lines = {block: "no content" for block in range(manager.config.num_blocks)}
    for run in manager.index.runs():
        for entry in run.entries:
            for place, block in enumerate(entry.blocks):
                name = entry.block_key(place, manager.block_size).name
                lines[block] = f"{name!r} after run {run.parent}, {entry.ref_count} holders"
    blocks = [f"block {block}: {line}" for block, line in lines.items()]
    tables = [f"table {table}" for table in manager.tables.live.values()]
    return "\n".join([f"free order: {[*manager.pool.free_order()]}", *blocks, *tables])

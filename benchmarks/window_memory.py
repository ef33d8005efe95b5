"""KV of one running request, with sliding windows and without. No model.

::

    python -m benchmarks.window_memory

The real cache heart computes a prompt in chunks, as the scheduler would, and the blocks that
the request holds after each length are counted, group by group. Bytes per block come from the
config, as ``ostinato size`` reads it. Without windows every layer keeps every block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import parser_of
from ostinato.assembly import build_cache
from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity, PrefixKey
from ostinato.hybrid.window_group import WindowGroup
from ostinato.lab.size.kv_bytes import KVBytes, kv_bytes
from ostinato.settings import PrefixCacheConfig, WindowConfig, window_blocks

BLOCK_SIZE, CHUNK = 16, 2_048
LENGTHS = (1_024, 4_096, 8_192, 16_384, 32_768, 131_072)
MIB = 2**20

SHAPES: Mapping[str, dict[str, Any]] = {
    "Gemma 3 4B": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    },
    "Mistral 7B v0.1": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
}


@dataclass(frozen=True)
class Held:
    """What one request of so many tokens holds.

    Attributes:
        num_tokens: Computed so far.
        windowed_bytes: With windows.
        whole_bytes: If every layer kept every block.
    """

    num_tokens: int
    windowed_bytes: int
    whole_bytes: int


def main() -> None:
    """Print a table per shape."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="lengths to show")
    options = parser.parse_args()
    for name, config in SHAPES.items():
        print_table(name, measure(config, sorted(options.tokens)))


def measure(config: Mapping[str, Any], lengths: Sequence[int]) -> list[Held]:
    """Compute a prompt in chunks, and note what is held at each of these lengths."""
    sized = kv_bytes(config)
    per_block = bytes_per_block(sized)
    windows = [window for window in per_block if window is not None]
    manager = _manager(windows, max(lengths))
    key = PrefixKey(Identity(), range(max(lengths) + 1))
    admitted = manager.admit(key, manager.match(key, 0), most_new=CHUNK)
    assert admitted is not None
    table, computed, held = admitted[0], 0, []
    for target in tqdm(lengths, unit="lengths", leave=False):
        while computed < target:
            computed = min(target, computed + CHUNK)
            assert manager.grow(table, computed)
            manager.publish(table, computed)
            manager.commit()
        held.append(_count(manager, computed, table.groups, per_block))
    return held


def bytes_per_block(sized: KVBytes) -> dict[int | None, int]:
    """Return bytes of one block by window; None is full attention."""
    results: dict[int | None, int] = {}
    for group in sized.groups:
        window = group.layer.window_tokens
        results[window] = results.get(window, 0) + group.token_bytes * BLOCK_SIZE
    return results


def print_table(name: str, rows: Sequence[Held]) -> None:
    """Show tokens against bytes."""
    table = Table("tokens", "all kept", "with windows", "share", title=name)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            f"{row.whole_bytes / MIB:,.0f} MiB",
            f"{row.windowed_bytes / MIB:,.0f} MiB",
            f"{row.windowed_bytes / row.whole_bytes:.0%}",
        )
    Console().print(table)


def _manager(windows: Sequence[int], num_tokens: int) -> CacheManager:
    """Make a heart in which windows have room for one request that computes in chunks."""
    num_blocks = num_tokens // BLOCK_SIZE + 1
    pools = [
        WindowConfig(window, window_blocks(window, BLOCK_SIZE) + CHUNK // BLOCK_SIZE)
        for window in windows
    ]
    manager = build_cache(PrefixCacheConfig(num_blocks, BLOCK_SIZE, windows=tuple(pools))).manager
    return manager


def _count(
    manager: CacheManager,
    num_tokens: int,
    tables: Sequence[Sequence[int]],
    per_block: Mapping[int | None, int],
) -> Held:
    """Count the blocks that hold something of so many tokens."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    windowed = num_blocks * per_block.get(None, 0)
    for window, blocks in zip(manager.contents[1:], tables[1:], strict=True):
        assert isinstance(window, WindowGroup)
        held = sum(block != window.null_block for block in blocks[:num_blocks])
        windowed += held * per_block[window.window]
    return Held(num_tokens, windowed, num_blocks * sum(per_block.values()))


if __name__ == "__main__":
    main()

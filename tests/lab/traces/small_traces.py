"""Traces small enough to be written down, and traffic that is drawn."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ostinato.lab.traces.block_trace import BlockRequest, BlockTrace
from ostinato.lab.traces.trace_builder import TraceBuilder

BLOCK = 512


def trace_of(*paths: str, block_tokens: int = 4, gap_s: float = 1.0, output_tokens: int = 2):
    """Return a trace with a letter per block; requests come at even gaps.

    Each prompt has one token more than its blocks hold.
    """
    requests = [
        BlockRequest(number * gap_s, len(path) * block_tokens + 1, output_tokens, tuple(path))
        for number, path in enumerate(paths)
    ]
    return TraceBuilder(requests).build("letters", block_tokens)


def drawn_trace(seed: int, num_requests: int = 300) -> BlockTrace:
    """Return chats whose turns go on from one another, and documents that come again."""
    draw = random.Random(seed)
    chats: list[list[int]] = [[seed] for _ in range(12)]
    fresh = iter(range(1000, 10**9))
    requests = []
    for number in range(num_requests):
        chat = draw.choice(chats)
        if draw.random() < 0.1:
            chat[:] = [draw.randrange(4)]
        chat += [next(fresh) for _ in range(draw.randrange(4))]
        tokens = len(chat) * 8 + draw.randrange(8)
        requests.append(BlockRequest(number * 1.5, tokens, draw.randrange(1, 6), tuple(chat)))
    return TraceBuilder(requests).build(f"drawn-{seed}", 8)


def write_mooncake(path: Path, rows: Sequence[tuple[int, int, int, list[int]]]) -> Path:
    """Write ``timestamp, input_length, output_length, hash_ids`` as Mooncake does."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_npz(path: Path, trace: BlockTrace) -> Path:
    """Write a trace as arrays."""
    np.savez(
        path,
        ts_ms=(trace.arrival_s * 1000).astype(np.int64),
        input_len=trace.input_tokens,
        output_len=trace.output_tokens,
        offsets=trace.offsets,
        ids=trace.ids.astype(np.int32),
    )
    return path

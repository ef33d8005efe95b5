"""A layer of a real model through attention of one's own, in a process with limits.

The arrays come from a step that the engine has planned: one query per sequence and head, the block
tables, and the keys and values of all blocks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.plugins.loading import import_file

Floats = npt.NDArray[np.float64]

LAYER_S = 60.0
"""Time limit of one layer."""


def attend_here(file: str, arrays: str) -> dict[str, Any]:
    """Compute a layer with a file's ``attend``, and compare it; for a child process.

    Args:
        file: Defines ``attend(q, tables, lengths, k, v)``.
        arrays: File of NumPy arrays: ``q`` of shape (num_sequences, num_heads, dim), ``k`` and
            ``v`` of shape (num_blocks, block_size, num_kv_heads, dim), ``tables`` and ``lengths``.

    Returns:
        Blocks that were read per head, and the largest difference to attention of each sequence
        alone; or an ``error``.
    """
    with np.load(arrays) as data:
        q, k, v = (data[name].astype(np.float64) for name in "qkv")
        lengths = data["lengths"].tolist()
        tables = [row[row >= 0].tolist() for row in data["tables"]]
    try:
        attend = import_file(Path(file)).attend
        return _by_head(attend, q, k, v, tables, lengths)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _by_head(
    attend: Callable[..., Any], q: Floats, k: Floats, v: Floats, tables: list[list[int]],
    lengths: list[int],
) -> dict[str, Any]:  # fmt: skip
    group, largest, num_read = q.shape[1] // k.shape[2], 0.0, 0
    for head in range(q.shape[1]):
        keys, values = (np.ascontiguousarray(x[:, :, head // group]) for x in (k, v))
        queries = np.ascontiguousarray(q[:, head])
        out, num_read = attend(queries, [t[:] for t in tables], lengths[:], keys, values)
        alone = attend_alone(queries, tables, lengths, keys, values)
        difference = float(np.abs(np.asarray(out) - alone).max())
        largest = max(largest, difference if np.isfinite(difference) else float("inf"))
    return {"num_read": int(num_read), "difference": largest, "num_heads": q.shape[1]}


def attend_alone(
    q: Floats, tables: list[list[int]], lengths: list[int], k: Floats, v: Floats
) -> Floats:
    """Return attention of one query per sequence, each by itself; shape (num_sequences, dim)."""
    dim = q.shape[1]
    return np.stack([
        softmax(q[m : m + 1], k[t].reshape(-1, dim)[:n], v[t].reshape(-1, dim)[:n])[0][0]
        for m, (t, n) in enumerate(zip(tables, lengths, strict=True))
    ])  # fmt: skip


def softmax(q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    """Return attention over all keys in one piece, shape (num_queries, dim), and log-sum-exps."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    highest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ v, (highest + np.log(total))[:, 0]

"""Lab 6: read a shared prefix once.

Fill the holes, then run ``ostinato labs check 6``.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks that are read once for some sequences.

    Attributes:
        members: Which sequences.
        blocks: The blocks, in the order of tokens.
        first: Place of the first of them in the members' tables.
    """

    members: tuple[int, ...]
    blocks: tuple[int, ...]
    first: int


def partial(q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    """Let queries attend to some keys.

    Args:
        q: Shape (num_queries, dim).
        k: Shape (num_keys, dim), at least one key.
        v: Shape (num_keys, dim).

    Returns:
        What each query reads, shape (num_queries, dim), and the logarithm of the sum of the
        exponentials of its scores, shape (num_queries,).
    """
    # Hole 1 (Softmax over a part): scores are q · k / sqrt(dim). Subtract each query's largest
    # score before np.exp, which overflows above 709, and add it to the logarithm again.
    scores = q @ k.T / np.sqrt(q.shape[1])
    largest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True)
    return weights @ v / total, (largest + np.log(total))[:, 0]
    # End of hole 1.


def merge(out: Floats, lse: Floats, other: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Merge what queries read from two disjoint parts of their keys; returns the same pair."""
    # Hole 2 (Merge by log-sum-exp): each part weighs exp of its log-sum-exp. Subtract the larger of
    # the two before np.exp.
    largest = np.maximum(lse, others)
    one, two = np.exp(lse - largest), np.exp(others - largest)
    total = one + two
    return (out * one[:, None] + other * two[:, None]) / total[:, None], largest + np.log(total)
    # End of hole 2.


def plan(tables: list[list[int]]) -> list[Run]:
    """Cover the block tables of a step by runs, each of them read once.

    Returns:
        Runs; together they have every block of every table once, and no two of them read one place
        of one prefix.
    """
    # Hole 3 (The plan: a tree of runs): sequences share a run as long as all of them have the same
    # blocks at the same places. Where they part, each group goes on by itself; a sequence alone has
    # a run of all that is left of its table.
    runs: list[Run] = []

    def follow(members: list[int], first: int) -> None:
        end = first
        while len({tuple(tables[m][end : end + 1]) for m in members}) == 1:
            if end == len(tables[members[0]]):
                break
            end += 1
        if end > first:
            runs.append(Run(tuple(members), tuple(tables[members[0]][first:end]), first))
        groups = defaultdict(list)
        for member in members:
            if end < len(tables[member]):
                groups[tables[member][end]].append(member)
        for group in groups.values():
            follow(group, end)

    if tables:
        follow(list(range(len(tables))), 0)
    return runs
    # End of hole 3.


def attend(
    q: Floats, tables: list[list[int]], lengths: list[int], k: Floats, v: Floats
) -> tuple[Floats, int]:
    """Let one query per sequence attend to all keys of its table, and read shared blocks once.

    Args:
        q: One query per sequence, shape (num_sequences, dim).
        tables: Block numbers of each sequence.
        lengths: Keys of each sequence; the last block may be partly filled.
        k: Keys of all blocks, shape (num_blocks, block_size, dim).
        v: Values likewise.

    Returns:
        What each query reads, shape (num_sequences, dim), and how many blocks were read.
    """
    # Hole 4 (Attend by runs): for each run, gather its keys once, up to the end of its members'
    # lengths; let all of its members attend to them together, and merge with what these have.
    size = k.shape[1]
    out, lse = np.zeros_like(q), np.full(len(q), -np.inf)
    num_read = 0
    for run in plan(tables):
        members, blocks = list(run.members), list(run.blocks)
        num_keys = min(len(blocks) * size, min(lengths[m] for m in members) - run.first * size)
        keys, values = (x[blocks].reshape(-1, x.shape[2])[:num_keys] for x in (k, v))
        num_read += len(blocks)
        part = partial(q[members], keys, values)
        out[members], lse[members] = merge(out[members], lse[members], *part)
    return out, num_read
    # End of hole 4.

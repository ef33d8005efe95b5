"""Cost of planning how a step is read. CPU time of one thread, no model and no keys.

::

    python -m benchmarks.planning

A step's tables are taken once (``checked``), then planned once for each kind of layer: here for
16 heads of queries on 8 of keys, without a window, for two threads. Scenes are decodes on a prefix
that all share; trees of a system prompt, four documents and two chats on each; and steps in which a
prompt is computed beside. ``inputs`` is what comes before: the plan of a step as arrays.
"""

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.attention.native_backend import (
    NativeLimits,
    PlanKind,
    StepTables,
    plan_native,
    plan_rules,
)
from ostinato.runner.inputs import build_inputs
from ostinato.runner.native.library import attention_isa, library

BLOCK_SIZE = 16
CPU = torch.device("cpu")
KIND = PlanKind(None, 2, 8, 2)
OWN = 32
PROMPT = 2_048


class Tables:
    """Block tables of sequences that share runs, given out one after the other."""

    def __init__(self) -> None:
        """Begin with no block given out."""
        self.num_blocks = 0
        self.sequences: list[tuple[array[int], int]] = []

    def take(self, num_tokens: int) -> "array[int]":
        """Give out blocks for so many tokens."""
        first, self.num_blocks = self.num_blocks, self.num_blocks - (-num_tokens // BLOCK_SIZE)
        return array("I", range(first, self.num_blocks))

    def add(self, shared: "array[int]", num_own: int, num_new: int = 1) -> None:
        """Let a sequence follow shared blocks with tokens of its own, the last ones new."""
        self.sequences.append((shared + self.take(num_own), num_new))

    def step(self) -> StepPlan:
        """One step of all of them."""
        return StepPlan(
            tuple(
                ScheduledSequence(
                    SequenceId(i), array("I", [0] * new), len(table) * BLOCK_SIZE - new, (table,)
                )
                for i, (table, new) in enumerate(self.sequences)
            )
        )


def scenes() -> Iterator[tuple[str, Tables]]:
    """Name steps, and lay them out."""
    for num in (1, 2, 4, 16, 64):
        for shared in (0, 128, 2_048, 16_384):
            yield f"{num} on {shared:,}", on_prefix(num, shared)
    for depth in (2, 3):
        for num in (16, 64):
            yield f"{num} in a tree of depth {depth}", tree(num, depth)
    for num in (4, 16):
        beside = on_prefix(num, 2_048)
        beside.add(array("I"), PROMPT, PROMPT)
        yield f"{num} on 2,048, a prompt of {PROMPT:,} beside", beside
    yield "16 of 32 new on 2,048", on_prefix(16, 2_048, 32)
    cold = Tables()
    cold.add(array("I"), PROMPT, PROMPT)
    yield f"a prompt of {PROMPT:,}", cold


def on_prefix(num: int, shared: int, num_new: int = 1) -> Tables:
    """Lay out sequences on a prefix that all share."""
    tables = Tables()
    prefix = tables.take(shared)
    for _ in range(num):
        tables.add(prefix, OWN, num_new)
    return tables


def tree(num: int, depth: int) -> Tables:
    """Lay out decodes on 512 shared tokens, 2,048 of four documents, and 256 of two chats each."""
    tables = Tables()
    system = tables.take(512)
    documents = [system + tables.take(2_048) for _ in range(4)]
    chats = [document + tables.take(256) for document in documents for _ in range(2)]
    for i in range(num):
        tables.add(documents[i % 4] if depth == 2 else chats[i % 8], OWN)
    return tables


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time of some work."""
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - start) / 1e3)
    return median(times)


def measure(native: ctypes.CDLL, tables: Tables, rounds: int) -> list[int]:
    """Measure a step: the columns of the table, microseconds and counts."""
    step, num_blocks = tables.step(), tables.num_blocks + 1
    [metadata] = build_inputs(step, BLOCK_SIZE, CPU).groups
    checked, limits = StepTables(metadata, num_blocks), NativeLimits.of(attention_isa(native))
    never, auto = (plan_rules(limits, KIND, setting) for setting in ("never", "auto"))
    inputs_us, checked_us, never_us, auto_us = (
        microseconds(work, rounds)
        for work in (
            lambda: build_inputs(step, BLOCK_SIZE, CPU),
            lambda: StepTables(metadata, num_blocks),
            lambda: plan_native(native, checked, never),
            lambda: plan_native(native, checked, auto),
        )
    )
    laid = plan_native(native, checked, auto).laid
    times = inputs_us, checked_us, never_us, auto_us, checked_us + auto_us
    return [*map(round, times), laid.num_items, laid.num_segments]


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=101)
    options = parser.parse_args()
    native = library()
    if native is None:
        parser.exit(1, "there is no native library here\n")
    table = Table(title=f"CPU time to plan a step, microseconds, medians of {options.rounds}")
    table.add_column("step")
    for column in ("inputs", "checked", "never", "auto", "checked + auto", "items", "segments"):
        table.add_column(column, justify="right")
    for name, tables in scenes():
        table.add_row(name, *map(str, measure(native, tables, options.rounds)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""In a plan, each row sees each of its keys once."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runner.attention.native_backend import (
    NativeLimits,
    NativeTables,
    PlanKind,
    plan_native,
    plan_rules,
)
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.native.library import Isa, library
from ostinato.runner.settings import ReadOnce
from tests.runner.attention.native_scenes import PlanView, limits, shapes
from tests.runner.attention.scene import Scene, Shape
from tests.support.instruction_sets import needs_library

pytestmark = needs_library


class Tables:
    """The tables of a scene, without a store."""

    num_blocks = 1000

    def __init__(
        self, shape: Shape, released: int | None = None, num_blocks: int = num_blocks
    ) -> None:
        scene = Scene.__new__(Scene)  # its tables alone: nothing is allocated, nothing computed
        scene.shape = shape
        self.num_blocks = num_blocks
        self.padding = self.num_blocks
        free = iter(np.random.default_rng(1).permutation(self.num_blocks).tolist())
        size = shape.block_size
        scene.tables = [[next(free) for _ in range(-(-sum(n) // size))] for n in shape.sequences]
        scene.whole = [() for _ in shape.sequences]  # type: ignore[misc]
        scene.share()
        self.tables = [list(table) for table in scene.tables]
        if released is not None:
            for (cached, _), table in zip(shape.sequences, scene.tables, strict=True):
                left = max(0, cached - released + 1) // size
                table[:left] = [self.padding] * left
        self.metadata: AttentionMetadata = scene.metadata()


def plan_tables(
    metadata: AttentionMetadata,
    kind: PlanKind,
    sizes: NativeLimits,
    read_once: ReadOnce,
    num_blocks: int = Tables.num_blocks + 1,
) -> PlanView:
    native = library()
    assert native is not None
    plan = plan_native(
        native, NativeTables(metadata, num_blocks), plan_rules(sizes, kind, read_once)
    )
    return PlanView(plan, metadata.block_size)


def looks(plan: PlanView, window: int | None) -> Counter[tuple[int, int, int]]:
    """Count (token, position, block) of all that the library would look at, as its header says."""
    assert_within(plan)
    counted: Counter[tuple[int, int, int]] = Counter()
    for item in plan.items:
        for segment in plan.segments[item["first_segment"] : item["last_segment"]]:
            first = max(item["first_row"], segment["first_row"])
            for row in range(first, min(item["last_row"], segment["last_row"])):
                at = int(plan.positions[row])
                for key in plan.keys_of(item, segment):
                    position = int(segment["first_position"]) + key
                    if position <= at and (window is None or position > at - window):
                        entry = segment["first_entry"] + key // plan.block_size
                        block = int(plan.blocks[entry])
                        counted[int(plan.tokens[row]), position, block] += 1
    return counted


def expected_looks(tables: Tables, shape: Shape, window: int | None) -> Counter[Any]:
    counted: Counter[Any] = Counter()
    token = 0
    for (cached, new), table in zip(shape.sequences, tables.tables, strict=True):
        for at in range(cached, cached + new):
            for position in range(max(0, at + 1 - window) if window else 0, at + 1):
                counted[token, position, table[position // shape.block_size]] += 1
            token += 1
    return counted


@given(
    shapes(),
    limits,
    st.none() | st.integers(1, 150),
    st.sampled_from([1, 2, 7]),
    st.sampled_from(["always", "auto", "never"]),
    st.booleans(),
)
def test_each_row_looks_at_each_of_its_keys_once(
    shape: Shape,
    sizes: NativeLimits,
    window: int | None,
    num_threads: int,
    read_once: Any,
    released: bool,
):
    """And at none that is not its own; trees, chunks, parts, and windows that were left."""
    tables = Tables(shape, window if released else None)
    kind = PlanKind(window, shape.group, shape.num_kv_heads, num_threads)

    plan = plan_tables(tables.metadata, kind, sizes, read_once)
    plan_tables(tables.metadata, kind, sizes, "never")  # the next one leaves this as it is

    assert sorted(plan.tokens) == list(range(sum(new for _, new in shape.sequences)))
    assert looks(plan, window) == expected_looks(tables, shape, window)
    assert_merged(plan, window)


def assert_within(plan: PlanView) -> None:
    """Nothing points beyond its array, or backwards."""
    segments, items, num_rows = plan.segments, plan.items, len(plan.tokens)
    assert len(plan.positions) == num_rows
    assert segments["first_entry"].min() >= 0 and segments["num_keys"].min() > 0
    ends = segments["first_entry"] + -(-segments["num_keys"] // plan.block_size)
    assert ends.max() <= len(plan.blocks)
    for records, what, stop in (
        (segments, "row", num_rows),
        (items, "row", num_rows),
        (items, "segment", len(segments)),
    ):
        first, last = records[f"first_{what}"], records[f"last_{what}"]
        assert first.min() >= 0 and (first < last).all() and last.max() <= stop
    cut = items[items["first_partial"] >= 0]
    assert (cut["first_section"] < cut["last_section"]).all()


def assert_merged(plan: PlanView, window: int | None = None) -> None:
    """Every row is in one item that leaves no partials, or in one merge of all that it has."""
    whole: Counter[int] = Counter()
    partials: dict[int, dict[int, int]] = {}  # by row and section
    most = 0
    for item in plan.items:
        rows = range(item["first_row"], item["last_row"])
        if item["first_partial"] < 0:
            whole.update(rows)
            continue
        sections = range(item["first_section"], item["last_section"])
        places = itertools.product(sections, rows)  # partials are in this order
        for partial, (section, row) in enumerate(places, int(item["first_partial"])):
            most = max(most, partial + 1)
            if _sees(plan, row, section, window):
                partials.setdefault(row, {})[section] = partial
    assert most == plan.laid.num_partials
    for row, of_row in plan.merges().items():
        assert of_row == [partials[row][section] for section in sorted(partials[row])]
        whole[row] += 1
    assert whole == dict.fromkeys(range(len(plan.tokens)), 1)


def _sees(plan: PlanView, row: int, section: int, window: int | None) -> bool:
    at, begin = int(plan.positions[row]), section * plan.section_keys
    return begin <= at and (window is None or begin + plan.section_keys > at - window + 1)


def plan_of(shape: Shape, num_threads: int, sizes: NativeLimits | None = None) -> PlanView:
    kind = PlanKind(None, shape.group, shape.num_kv_heads, num_threads)
    return plan_tables(Tables(shape).metadata, kind, sizes or NativeLimits(), "auto")


def rows_of_items(plan: PlanView) -> list[tuple[int, int]]:
    return sorted((int(item["first_row"]), int(item["last_row"])) for item in plan.items)


def test_those_who_share_are_one_item_strangers_are_not_and_chunks_come_last_in_pieces():
    """Two on one prompt, a stranger, and 300 tokens of a prompt in items of at most 128 tokens."""
    shape = Shape(
        sequences=((100, 1), (500, 300), (50, 1), (100, 1)),
        likes=((0, 0), (1, 0), (2, 0), (0, 6)),
        group=2,
        block_size=16,
    )

    plan = plan_of(shape, 1, NativeLimits(item_rows=256, keys_per_run=0, max_packed_cost=0))

    assert rows_of_items(plan) == [(0, 2), (2, 3), (3, 103), (103, 203), (203, 303)]
    assert plan.tokens[:4].tolist() == [0, 302, 301, 1]


def test_a_family_of_too_many_rows_is_cut_where_it_shares_least():
    """Four and three decodes on two documents, at most five rows: each document is one item.

    They come in the order in which the step has them, whatever the ids of their blocks.
    """
    shape = Shape(
        sequences=((200, 1),) * 7,
        likes=((0, 0), (0, 12), (0, 4), (0, 12), (0, 12), (2, 12), (2, 12)),
        block_size=16,
    )

    plan = plan_of(shape, 1, NativeLimits(item_rows=5))

    assert rows_of_items(plan) == [(0, 4), (4, 7)]
    assert plan.tokens.tolist() == [0, 1, 3, 4, 2, 5, 6]


@pytest.mark.parametrize(("num_threads", "num_items"), [(1, 2), (2, 4), (16, 16)])
def test_short_strangers_are_one_item_as_long_as_all_threads_find_tasks(num_threads, num_items):
    """Sixteen of 61 tokens, two heads of keys: each costs 67 readings, and 1,024 make a task.

    Two threads shall find eight tasks, which is four items for each head of keys.
    """
    shape = Shape(((60, 1),) * 16, num_kv_heads=2, block_size=16)

    assert len(plan_of(shape, num_threads).items) == num_items


@pytest.mark.parametrize(("num_threads", "num_parts"), [(1, 1), (2, 4), (4, 8), (64, 10)])
def test_a_long_context_is_cut_for_threads_that_would_wait(num_threads: int, num_parts: int):
    """10,000 keys and two heads of them: four tasks for each thread, of whole sections of 1,024."""
    plan = plan_of(Shape(((9_999, 1),), num_kv_heads=2, block_size=16), num_threads)

    assert len(plan.items) == num_parts
    assert plan.laid.num_partials == (0 if num_parts == 1 else 10)


def test_short_contexts_are_not_cut_however_many_threads_there_are():
    plan = plan_of(Shape(((300, 1), (200, 1)), block_size=16), 64)

    assert len(plan.items) == 2 and plan.laid.num_partials == 0


def test_the_dearest_item_comes_first():
    plan = plan_of(Shape(((30, 1), (3000, 1), (300, 1)), block_size=16), 1)

    assert plan.tokens[plan.items["first_row"]].tolist() == [1, 2, 0]


def test_sharing_pays_by_the_keys_that_are_not_read_again():
    """On AMX, ten blocks for two decodes do; two prompts of 60 new tokens need more than 38.

    There, runs are an even number of blocks. With other instructions products cost more, and a row
    asks for twice as many.
    """

    def shares(new: int, num_blocks: int, isa: Isa = Isa.AMX) -> bool:
        cached = 16 * num_blocks + 8
        shape = Shape(((cached, new),) * 2, ((0, 0), (0, num_blocks)), block_size=16)
        return len(plan_of(shape, 1, NativeLimits.of(isa)).segments) == 3

    assert shares(1, 10) and shares(60, 40)
    assert not shares(1, 9) and not shares(60, 39) and not shares(4, 10)
    assert shares(1, 10, Isa.AVX2) and not shares(1, 9, Isa.AVX2)


@pytest.mark.parametrize("isa", [Isa.AMX, Isa.AVX512])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize("num_decodes", [1, 2, 3, 4, 8, 16, 64])
def test_where_nothing_is_worth_sharing_auto_plans_what_never_plans(num_decodes, num_threads, isa):
    """The same rows, segments, items and parts: what is the same cannot be slower."""
    sizes, kind = NativeLimits.of(isa), PlanKind(None, 2, 8, num_threads)
    for num_blocks in range(13):
        saved = 16 * num_blocks * (num_decodes - 1)
        if saved > sizes.keys_per_run + sizes.keys_per_row * 2 * num_decodes:
            break
        cached = 16 * num_blocks + 24
        likes = tuple((0, num_blocks) for _ in range(num_decodes))
        tables = Tables(Shape(((cached, 1),) * num_decodes, likes, group=2, block_size=16))
        auto, never = (
            plan_tables(tables.metadata, kind, sizes, setting) for setting in ("auto", "never")
        )
        for field in ("tokens", "positions", "blocks", "segments", "items"):
            np.testing.assert_array_equal(getattr(auto, field), getattr(never, field))
        assert auto.merges() == never.merges()


@pytest.mark.parametrize("isa", [Isa.AMX, Isa.AVX512])
@pytest.mark.parametrize("num_blocks", [1, 4, 8, 32, 128])
@pytest.mark.parametrize("num_decodes", [2, 4, 16, 64])
def test_auto_never_plans_more_than_never(num_decodes: int, num_blocks: int, isa: Isa):
    """Neither more items nor more readings; a shared run is one segment more for all who share."""
    sizes, kind = NativeLimits.of(isa), PlanKind(None, 2, 8, 2)
    likes = tuple((0, num_blocks) for _ in range(num_decodes))
    shape = Shape(((16 * num_blocks + 24, 1),) * num_decodes, likes, group=2, block_size=16)
    tables = Tables(shape, num_blocks=20_000)
    auto, never = (
        plan_tables(tables.metadata, kind, sizes, setting, tables.num_blocks + 1)
        for setting in ("auto", "never")
    )

    assert len(auto.items) <= len(never.items)
    assert len(auto.blocks) <= len(never.blocks)
    assert auto.laid.num_segments <= never.laid.num_segments + 1
    assert auto.reads().total() <= never.reads().total()


@pytest.mark.parametrize(
    ("array", "index", "value", "said"),
    [
        ("starts", 0, 1, "rows"),
        ("starts", 1, 0, "rows"),
        ("first_positions", 0, -1, "positions"),
        ("first_positions", 0, 2**31, "positions"),
        ("starts", -1, 2**31, "rows"),
        ("first_positions", 1, 48, "tables"),
        ("table_starts", 0, -1, "tables"),
        ("table_starts", 1, 312, "tables"),
        ("table_starts", -1, 10**6, "tables"),
        ("blocks", 0, Tables.num_blocks + 1, "blocks"),
        ("blocks", 0, -1, "blocks"),
    ],
)
def test_tables_that_point_beyond_what_is_there_are_refused(array, index, value, said):
    """Before they are used."""
    metadata = Tables(Shape(((5_000, 1), (40, 3)), block_size=16)).metadata
    kind, sizes = PlanKind(None, 1, 1, 1), NativeLimits()
    plan_tables(metadata, kind, sizes, "auto")
    wrong = getattr(metadata, array).copy()
    wrong[index] = value

    with pytest.raises(ValueError, match=rf"^{said} of a step are out of range"):
        plan_tables(replace(metadata, **{array: wrong}), kind, sizes, "auto")


def test_arrays_that_are_too_short_and_numbers_that_are_apart_are_seen_to():
    metadata = Tables(Shape(((50, 1), (40, 3)), block_size=16)).metadata
    kind, sizes = PlanKind(None, 1, 1, 1), NativeLimits()
    for array in ("starts", "table_starts"):
        with pytest.raises(AssertionError, match="an end for each"):
            plan_tables(
                replace(metadata, **{array: getattr(metadata, array)[:-1]}), kind, sizes, "auto"
            )
    apart = {name: np.repeat(getattr(metadata, name), 2)[::2] for name in ("starts", "blocks")}
    few = {"first_positions": metadata.first_positions.astype(np.int32)}

    plan = plan_tables(replace(metadata, **apart, **few), kind, sizes, "auto")

    assert looks(plan, None) == looks(plan_tables(metadata, kind, sizes, "auto"), None)


def test_a_plan_that_takes_much_memory_is_given_it():
    """Two thousand rows are 16 KiB of places and positions alone: more than is offered first."""
    plan = plan_of(Shape(((0, 2_048), (300, 1)), block_size=16), 2)

    assert sorted(plan.tokens) == list(range(2_049))
    assert plan.positions[plan.tokens == 2_047].tolist() == [2_047]

"""What a plan reads, counted from the plan: each distinct key once for all rows that see it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.gpu.read_parts import PartLimits, ReadParts, plan_parts
from tests.runner.attention.native_scenes import shapes
from tests.runner.attention.scene import TREE, Scene, Shape


def slots_of(plan: ReadParts, scene: Scene, part: np.ndarray) -> list[int]:
    """The slots of a part's keys."""
    blocks, size = scene.metadata().blocks, scene.shape.block_size
    _, _, table, first, end, _ = part.tolist()
    return [int(blocks[table + key // size]) * size + key % size for key in range(first, end)]


def parts_of(plan: ReadParts) -> np.ndarray:
    return np.concatenate((plan.narrow, plan.wide))


def seen_by_rows(plan: ReadParts, scene: Scene) -> dict[int, Counter[int]]:
    """How often each row of the step sees each slot."""
    seen: dict[int, Counter[int]] = {int(token): Counter() for token in plan.tokens}
    for part in parts_of(plan):
        slots = slots_of(plan, scene, part)
        for row in range(part[0], part[0] + part[1]):
            visible = max(0, int(plan.positions[row]) + 1 - int(part[3]))
            seen[int(plan.tokens[row])].update(slots[:visible])
    return seen


def scene_of(shape: Shape) -> Scene:
    return Scene(shape, torch.float32, TorchAttention())


@given(shapes(), st.sampled_from([None, True, False]), st.booleans(), st.integers(1, 3))
def test_each_row_sees_each_of_its_keys_once(shape, share, same_bits, scale):
    """Whatever is shared, split and tiled."""
    scene = scene_of(shape)
    limits = PartLimits.of(shape.group, 64, same_bits)
    if not same_bits:
        limits = replace(limits, narrow_keys=32 * scale, wide_keys=64 * scale, max_split_tokens=8)

    plan = plan_parts(scene.metadata(), limits, share=share)

    row, seen = 0, seen_by_rows(plan, scene)
    for (cached, new), table in zip(shape.sequences, scene.tables, strict=True):
        for position in range(cached, cached + new):
            expected = scene.slots(table, position + 1).tolist()
            assert seen[row] == dict.fromkeys(expected, 1)
            row += 1


@pytest.mark.parametrize("window", [None, 180])
def test_a_step_of_decodes_reads_each_distinct_key_once(window: int | None):
    """Law 2: the bytes that a step reads are those of its distinct keys and values.

    Decodes have one tile of rows, so that what programs load is what memory is read for.
    """
    shape = replace(TREE, sequences=tuple((cached, 1) for cached, _ in TREE.sequences))
    scene = scene_of(shape)

    plan = plan_parts(scene.metadata(), PartLimits.of(2, 64, False), window, share=True)

    read = Counter(slot for part in parts_of(plan) for slot in slots_of(plan, scene, part))
    distinct = {
        slot
        for (cached, _), table in zip(shape.sequences, scene.tables, strict=True)
        for slot in scene.slots(table, cached + 1).tolist()[-(window or cached + 1) :]
    }
    assert read == dict.fromkeys(distinct, 1)
    assert plan.keys_fetched == plan.keys_issued == len(distinct)
    layer = scene.store.spec.layers[0]
    num_bytes = plan.keys_fetched * layer.bytes_per_token(torch.bfloat16)
    assert num_bytes == sum(2 * 2 * (4 + 4) // 2 for _ in distinct) * layer.num_kv_heads


def test_a_plan_that_shares_nothing_reads_shared_keys_again():
    """So that the test above is known to be able to fail."""
    scene = scene_of(TREE)
    together, alone = (
        plan_parts(scene.metadata(), PartLimits.of(2, 64, False), share=share)
        for share in (True, False)
    )
    assert alone.keys_fetched - together.keys_fetched == 128 * 4 + 64 * 2


def test_further_row_tiles_of_the_same_keys_are_adjacent():
    """They run at the same time, and meet the keys in the L2 cache."""
    scene = scene_of(Shape(((0, 300),), (), 1, 4, block_size=16))
    limits = replace(PartLimits.of(4, 64, False), max_split_tokens=300, wide_keys=64)

    plan = plan_parts(scene.metadata(), limits)

    assert plan.keys_fetched == 300 < plan.keys_issued
    assert np.all(np.diff(plan.wide[:, 3] // 64) >= 0)


def test_a_shared_run_is_read_once_only_where_that_saves_keys():
    """``auto``: 4 decodes on 8 blocks of 16 save 384 keys; two of them 128."""
    few = replace(TREE, sequences=TREE.sequences[3:], likes=((0, 0), (0, 8)), group=1)
    many = replace(few, sequences=few.sequences * 4, likes=((0, 0),) + ((0, 8),) * 7)
    for shape, shares in ((few, False), (many, True)):
        metadata = scene_of(shape).metadata()
        auto, never = (
            plan_parts(metadata, PartLimits.of(1, 64, False), share=share)
            for share in (None, False)
        )
        assert (auto.keys_fetched < never.keys_fetched) == shares

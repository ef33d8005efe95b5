"""Whatever the shapes, trees, parts and instruction sets, the library gives what is right.

The store is NaN wherever the step may not look, so that a look shows.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.native_backend import NativeAttention, NativeLimits, NativeStep
from ostinato.runner.native.library import Isa, library
from ostinato.runner.settings import ReadOnce
from tests.runner.attention.native_scenes import PlanView, limits, shapes
from tests.runner.attention.scene import TREE, Scene, Shape, styles
from tests.support.instruction_sets import ISAS, isa_in_use, needs_library, threads_in_use

pytestmark = needs_library

EXACT = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Distances that rounding explains, values being drawn from a normal distribution.

An output is a mean of values up to about 4. In float32 what counts is the exponential of scores
up to about 100, each off by a few of its last places. Weights and outputs are rounded to 11 bits
in float16 and to 8 in bfloat16: half a unit of 2**-8 of each weight, times 4.
"""


OF_CODES = 2e-3
"""Over codes of 8 bits, queries and weights are rounded to 16 bits below their largest, however
they came: a score of two norms of 11 is off by some 1e-4 then, and so is an output."""


def reads_of(step: object, window: int | None) -> Counter[int]:
    """How often each block is read for one of two heads of keys."""
    assert isinstance(step, NativeStep)
    plan = step.plan(2, step.store.spec.layers[0], window)
    return PlanView(plan, step.store.block_size).reads()


def backend(read_once: ReadOnce = "always", sizes: NativeLimits | None = None) -> NativeAttention:
    native = library()
    assert native is not None
    return NativeAttention(native, read_once, sizes)


@given(st.data(), shapes(), limits, st.sampled_from(list(EXACT)), st.integers(0, 2**16))
def test_every_query_gets_what_the_reference_gives_it(data, shape, sizes, dtype, seed):
    """Grouped heads, windows, soft caps, sinks, chunks, trees, parts, codes, on each set."""
    style = data.draw(styles(shape.num_kv_heads * shape.group, scales=[shape.key_dim**-0.5]))
    read_once = data.draw(st.sampled_from(["always", "always", "auto", "never"]))
    kv_dtype = data.draw(st.sampled_from([dtype, dtype, torch.int8]))
    scene = Scene(shape, dtype, backend(read_once, sizes), seed, kv_dtype)
    if style.window is not None and data.draw(st.booleans()):
        scene.release(style.window)

    isa, num_threads = data.draw(st.sampled_from(ISAS)), data.draw(st.sampled_from([1, 2, 5]))
    with isa_in_use(isa), threads_in_use(num_threads):
        found = scene.attend(style)

    assert found.dtype == dtype
    near = EXACT[dtype]
    if kv_dtype == torch.int8:
        scene.keep_in_codes()
        near = max(near, OF_CODES)
    torch.testing.assert_close(found.double(), scene.expected(style), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", EXACT)
def test_each_instruction_set_reads_a_long_context_in_parts_and_a_tree_beside_it(isa: Isa, dtype):
    """Decodes on a shared prompt, a chunk, and 1,500 tokens that four threads share."""
    shape = Shape(
        sequences=((1500, 1), (300, 1), (290, 2), (288, 1), (333, 130), (0, 40)),
        likes=((0, 0), (1, 0), (1, 18), (2, 12), (1, 18), (5, 0)),
        num_kv_heads=2,
        group=2,
        key_dim=128,
        value_dim=128,
        block_size=16,
    )
    scene = Scene(shape, dtype, backend(sizes=NativeLimits(min_part=64)))
    style = AttentionStyle(scale=128**-0.5)

    with threads_in_use(4):
        found = scene.attend(style)

    torch.testing.assert_close(
        found.double(), scene.expected(style), rtol=EXACT[dtype], atol=EXACT[dtype]
    )


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 80), (256, 256), (640, 24)])
def test_each_instruction_set_multiplies_codes_in_32_bits_without_overflow(
    isa: Isa, key_dim: int, value_dim: int
):
    """Keys, queries and values whose every element is as large as any: sums are the largest."""
    shape = Shape(((700, 1), (300, 40)), ((0, 0), (0, 9)), 1, 3, key_dim, value_dim, block_size=32)
    scene = Scene(shape, torch.float32, backend(), kv_dtype=torch.int8)
    scene.queries = torch.full_like(scene.queries, 3)
    scene.whole = [(torch.full_like(k, 2), torch.full_like(v, 4)) for k, v in scene.whole]
    scene.poison()
    scene.fill()
    style = AttentionStyle(scale=key_dim**-0.5 / 8)

    found = scene.attend(style)

    torch.testing.assert_close(found, torch.full_like(found, 4.0), rtol=1e-3, atol=1e-3)


def test_keys_that_are_no_numbers_give_outputs_that_are_none():
    """As in every other format: what is wrong in the model is not hidden by its codes."""
    scene = Scene(Shape(((20, 1), (5, 1)), block_size=16), torch.float32, backend(), 0, torch.int8)
    first_slot = torch.tensor(scene.tables[0][:1]) * 16
    scene.store.write(0, torch.full((1, 1, 4), torch.inf), torch.ones(1, 1, 4), first_slot)

    step = scene.backend.start(scene.metadata(), scene.store)
    found = step.attend(0, scene.queries, *scene.new_rows(), AttentionStyle(scale=1.0))

    assert found[0].isnan().all() and found[1].isfinite().all()


# --- what is refused before C++ sees a pointer ---


def wrong(scene: Scene, **changed: torch.Tensor) -> None:
    keys, values = scene.new_rows()
    rows = {"queries": scene.queries, "keys": keys, "values": values} | changed
    step = scene.backend.start(scene.metadata(), scene.store)
    with pytest.raises(ValueError, match="the native library needs that"):
        step.attend(0, style=AttentionStyle(scale=1.0), **rows)


def test_rows_of_another_shape_or_dtype_are_refused():
    scene = Scene(Shape(((20, 3),), block_size=16), torch.float32, backend())
    keys, values = scene.new_rows()

    wrong(scene, queries=scene.queries[:2])
    wrong(scene, queries=scene.queries[:, :, :2])
    wrong(scene, keys=keys[:2])
    wrong(scene, values=values.expand(3, 2, 4))
    wrong(scene, queries=scene.queries.double())


def test_slots_and_blocks_beyond_the_store_are_refused():
    scene = Scene(Shape(((20, 3),), block_size=16), torch.float32, backend())
    scene.tables[0][0] = scene.store.num_blocks + 1
    with pytest.raises(ValueError, match="blocks of a step"):
        scene.attend(AttentionStyle(scale=1.0))

    scene.tables[0][1] = scene.store.num_blocks + 1
    with pytest.raises(ValueError, match="slots are between 0"):
        scene.attend(AttentionStyle(scale=1.0))


def test_sinks_are_one_for_each_head():
    scene = Scene(Shape(((20, 3),), block_size=16), torch.float32, backend())
    with pytest.raises(ValueError, match="sinks"):
        scene.attend(AttentionStyle(scale=1.0, sinks=torch.zeros(2)))


# --- read once (law 2) ---


@pytest.mark.parametrize("window", [None, 180])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_each_shared_block_is_read_once_in_a_step(num_threads: int, window: int | None):
    """Law 2, down a tree: 8 blocks by five sequences, 4 by three, and every tail by its own.

    Also within a window that hides some of it, and however many threads share the work.
    """
    scene = Scene(TREE, torch.float32, backend(sizes=NativeLimits(min_part=1)))

    with threads_in_use(num_threads):
        step = scene.backend.start(scene.metadata(), scene.store)
        read = reads_of(step, window)

    used = {block for table in scene.tables for block in table}
    assert read == dict.fromkeys(used, 1)


def test_windows_share_what_some_of_them_have_left_in_part():
    """One prompt of 12 blocks; windows of 100 that end in its blocks 5, 5, 6 and 7, and beyond."""
    shape = Shape(
        sequences=((193, 1), (195, 1), (200, 1), (220, 1), (500, 1)),
        likes=((0, 0), (0, 12), (0, 12), (0, 12), (0, 12)),
        group=2,
        block_size=16,
    )
    scene = Scene(shape, torch.float32, backend())
    shared = scene.tables[0][:12]
    scene.release(100)
    lefts = [table.count(scene.store.num_blocks) for table in scene.tables]
    assert lefts == [5, 6, 6, 7, 25]

    step = scene.backend.start(scene.metadata(), scene.store)
    read = reads_of(step, 100)

    assert [read[block] for block in shared] == [0] * 5 + [1] * 7
    style = AttentionStyle(scale=1.0, window=100)
    torch.testing.assert_close(
        scene.attend(style).double(), scene.expected(style), rtol=1e-4, atol=1e-4
    )


def test_a_backend_that_may_not_read_once_reads_for_each_sequence():
    """So that the test above is known to be able to fail, and both ways agree."""
    scene = Scene(TREE, torch.float32, backend())
    style, alone = AttentionStyle(scale=1.0), backend("never")

    step = alone.start(scene.metadata(), scene.store)
    read = reads_of(step, None)

    assert [read[block] for block in scene.tables[0][:12]] == [5] * 8 + [3] * 4
    torch.testing.assert_close(scene.attend(style), scene.attend(style, alone))

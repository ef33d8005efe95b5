"""Whatever the shapes, blocks and limits, each query gets what the slow reference gives it.

The store is NaN wherever the step may not look, so that a look shows.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.torch_backend import ScratchLimits, SharingBytes, TorchAttention
from tests.runner.attention.scene import Scene, Shape, styles

ALWAYS = SharingBytes(per_run=0, per_value=0)
"""Every shared block is worth a reading of its own."""
EAGER = TorchAttention(sharing=ALWAYS)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """A few sequences; like lengths are common, so that they meet in batches."""
    cached = st.sampled_from([0, 0, 3, 4, 9]) | st.integers(0, 20)
    new = st.sampled_from([1, 1, 4, 5]) | st.integers(1, 12)
    sequences = draw(st.lists(st.tuples(cached, new), min_size=1, max_size=6))
    return Shape(
        sequences=tuple(sequences),
        likes=tuple(
            draw(st.tuples(st.integers(0, i), st.integers(0, 5))) for i in range(len(sequences))
        ),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([2, 4])),
        value_dim=draw(st.sampled_from([2, 4, 6])),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
    )


scratch_limits = st.builds(
    ScratchLimits,
    gather_bytes=st.sampled_from([1, 300, 1000, 2**22]),
    fused_bytes=st.sampled_from([1, 1000, 2**28]),
    score_bytes=st.sampled_from([1, 500, 2**25]),
)


@given(st.data(), shapes(), scratch_limits, st.integers(0, 2**16))
def test_every_query_gets_what_the_reference_gives_it(data, shape, scratch, seed):
    """Grouped heads, windows, soft caps, sinks, chunks, padding, tiles, shared runs, in float64."""
    style = data.draw(styles(shape.num_kv_heads * shape.group))
    sharing = data.draw(st.sampled_from([ALWAYS, ALWAYS, SharingBytes(200, 1), None]))
    scene = Scene(shape, torch.float64, TorchAttention(scratch, sharing), seed)

    found = scene.attend(style)

    torch.testing.assert_close(found, scene.expected(style), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 20])
def test_every_dtype_is_right_to_its_own_precision(dtype, tolerance, cap, window):
    likes = ((0, 0), (1, 0), (1, 6), (1, 4))
    scene = Scene(Shape(((0, 9), (30, 1), (28, 1), (17, 6)), likes, 2, 2), dtype, EAGER)
    style = AttentionStyle(scale=0.5, window=window, soft_cap=cap)

    found = scene.attend(style)

    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), scene.expected(style), rtol=tolerance, atol=tolerance
    )


# --- read once (law 2) ---


def blocks_read(
    scene: Scene, style: AttentionStyle, sharing: SharingBytes | None = ALWAYS
) -> Counter[int]:
    """Count how often each block is fetched in one layer of one step."""
    counts: Counter[int] = Counter()
    fetch = scene.store.gather

    def counting(layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        counts.update(blocks.flatten().tolist())
        return fetch(layer, blocks)

    with mock.patch.object(scene.store, "gather", counting):
        scene.attend(style, TorchAttention(sharing=sharing))
    return Counter({block: count // 2 for block, count in counts.items()})  # it attends twice


TREE = Shape(
    # A system prompt of 8 blocks for all five; a document of 4 more for the first three.
    sequences=((50, 1), (48, 1), (49, 5), (34, 1), (39, 1)),
    likes=((0, 0), (0, 12), (0, 12), (0, 8), (0, 8)),
    group=2,
)


def test_each_shared_block_is_read_once_in_a_step():
    """Law 2, down a tree: 8 blocks by five sequences, 4 by three, and every tail by its own."""
    scene = Scene(TREE, torch.float32, EAGER)

    read = blocks_read(scene, AttentionStyle(scale=1.0))

    assert [read[block] for block in scene.tables[0][:12]] == [1] * 12
    tails = {block for table in scene.tables for block in table[8:]}
    assert all(read[block] == 1 for block in tails)


def test_a_backend_that_may_not_read_once_reads_for_each_sequence():
    """So that the test above is known to be able to fail, and both ways agree."""
    scene = Scene(TREE, torch.float64, EAGER)
    style = AttentionStyle(scale=1.0)
    alone = blocks_read(scene, style, sharing=None)

    assert [alone[block] for block in scene.tables[0][:12]] == [5] * 8 + [3] * 4
    torch.testing.assert_close(
        scene.attend(style),
        scene.attend(style, TorchAttention(sharing=None)),
        rtol=1e-12,
        atol=1e-12,
    )

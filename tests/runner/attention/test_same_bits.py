"""A query's result depends only on its own sequence, to the bit: law 7 of native attention.

Not on where its blocks are or how large they are, on what else the step brings, on which runs are
read once, on parts, threads, or how many rows a kernel takes at a time.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.native_backend import NativeAttention, NativeLimits
from ostinato.runner.native.library import Isa, library
from tests.runner.attention.native_scenes import limits, shapes
from tests.runner.attention.scene import Scene, Shape, styles
from tests.support.instruction_sets import ISAS, isa_in_use, needs_library, threads_in_use

pytestmark = needs_library

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
"""Of keys and values; over codes of 8 bits, queries are bfloat16."""


def alone(scene: Scene, sizes: NativeLimits, style: AttentionStyle, block_size: int) -> Tensor:
    """Let each query of a scene decode by itself, one after the other, in blocks of its own."""
    native = library()
    assert native is not None
    backend = NativeAttention(native, "never", sizes)
    found, row = [], 0
    for (cached, new), (keys, values) in zip(scene.shape.sequences, scene.whole, strict=True):
        for position in range(cached, cached + new):
            shape = replace(
                scene.shape, sequences=((position, 1),), likes=(), block_size=block_size
            )
            solo = Scene(shape, scene.queries.dtype, backend, position, scene.store.dtype)
            solo.whole = [(keys[: position + 1], values[: position + 1])]
            solo.queries = scene.queries[row : row + 1]
            solo.store.write(
                0, keys[:position], values[:position], solo.slots(solo.tables[0], position)
            )
            found.append(solo.attend(style))
            row += 1
    return torch.cat(found)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected) and not found.isnan().any()


@given(st.data(), shapes(), limits, st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_a_query_gets_in_a_batch_what_it_gets_alone(data, shape, sizes, kv_dtype, seed):
    """Grouped heads, windows, soft caps, sinks, chunks, trees, parts, on each instruction set."""
    dtype = torch.bfloat16 if kv_dtype == torch.int8 else kv_dtype
    style = data.draw(styles(shape.num_kv_heads * shape.group, scales=[shape.key_dim**-0.5]))
    isa = data.draw(st.sampled_from(ISAS))
    native = library()
    assert native is not None
    with isa_in_use(isa), threads_in_use(1):
        read_once = data.draw(st.sampled_from(["always", "always", "auto", "never"]))
        scene = Scene(shape, dtype, NativeAttention(native, read_once, sizes), seed, kv_dtype)
        expected = alone(scene, sizes, style, data.draw(st.sampled_from([16, 64])))
        if style.window is not None and data.draw(st.booleans()):
            scene.release(style.window)
        with threads_in_use(data.draw(st.sampled_from([1, 2, 5]))):
            found = scene.attend(style)

    assert same_bits(found, expected)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_each_instruction_set_gives_the_bits_of_a_decode_alone(isa: Isa, kv_dtype: torch.dtype):
    """Decodes on a shared prompt, a chunk, and 1,100 tokens that four threads share."""
    shape = Shape(
        sequences=((1100, 1), (300, 1), (290, 2), (288, 1), (333, 35), (0, 20)),
        likes=((0, 0), (1, 0), (1, 17), (2, 12), (1, 18), (5, 0)),
        num_kv_heads=2,
        group=2,
        key_dim=64,
        value_dim=64,
        block_size=16,
    )
    native = library()
    assert native is not None
    sizes = NativeLimits.of(isa)
    dtype = torch.bfloat16 if kv_dtype == torch.int8 else kv_dtype
    attention = NativeAttention(native, "always", replace(sizes, min_part=64))
    scene = Scene(shape, dtype, attention, kv_dtype=kv_dtype)
    style = AttentionStyle(scale=64**-0.5)

    with threads_in_use(4):
        found = scene.attend(style)

    assert same_bits(found, alone(scene, sizes, style, 64))

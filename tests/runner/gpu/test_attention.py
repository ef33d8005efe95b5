"""Each query gets what the slow reference gives it, from kernels in Triton's interpreter.

The store is NaN wherever the step may not look, so that a look shows. This proves arithmetic and
addresses; races, layouts at run time and speed it does not.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.gpu.backend import TritonAttention
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from tests.runner.attention.scene import Scene, Shape
from tests.support.triton import needs_triton

pytestmark = needs_triton

NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OF_CODES = 2e-2
"""Weights times the scales of values are rounded to the format of the queries."""

MIXED = Shape(
    # Two decodes on a shared prompt, a chunk on it, a longer decode, a fresh prompt.
    sequences=((50, 1), (48, 1), (49, 5), (270, 1), (0, 9)),
    likes=((0, 0), (0, 3), (0, 3), (3, 0), (4, 0)),
    num_kv_heads=2,
    group=2,
    key_dim=64,
    value_dim=64,
    block_size=16,
)
PLAIN = AttentionStyle(scale=0.125)
SINKS = torch.tensor([1.0, 0.0, -2.0, 0.5])
STYLES = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=20),
    "cap": replace(PLAIN, soft_cap=5.0),
    "sinks": replace(PLAIN, sinks=SINKS),
    "all": AttentionStyle(0.125, 33, 5.0, SINKS),
}


def check(shape: Shape, style: AttentionStyle, dtype: torch.dtype, kv: torch.dtype, **how) -> None:
    scene = Scene(shape, dtype, TritonAttention(**how), kv_dtype=kv)
    if style.window is not None:
        scene.release(style.window)

    result = scene.attend(style)

    assert result.dtype == dtype
    near = NEAR[dtype]
    if kv == torch.int8:
        scene.keep_in_codes()
        near = max(near, OF_CODES if dtype != torch.float32 else near)
    elif kv != dtype:
        scene.whole = [(k.to(kv).to(dtype), v.to(kv).to(dtype)) for k, v in scene.whole]
    torch.testing.assert_close(result.double(), scene.expected(style), rtol=near, atol=near)


@pytest.mark.parametrize(
    ("style", "dtype", "kv", "read_once", "same_bits"),
    [
        ("all", torch.float32, torch.int8, "always", False),
        ("window", torch.bfloat16, torch.bfloat16, "always", False),
        ("sinks", torch.float16, torch.int8, "never", False),
        ("cap", torch.float16, torch.float16, "auto", True),
    ],
)
def test_a_mixed_step_is_right(style, dtype, kv, read_once, same_bits):
    """Decodes, a chunk and a fresh prompt in one step, each feature and format at least once."""
    check(MIXED, STYLES[style], dtype, kv, read_once=read_once, same_bits=same_bits)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("group", "key_dim", "value_dim", "block_size"),
    [(7, 80, 48, 4), (1, 128, 128, 48), (3, 192, 128, 16), (2, 256, 256, 1), (32, 96, 96, 32)],
)
def test_heads_and_blocks_of_any_size_are_right(group, key_dim, value_dim, block_size):
    """Neither groups, heads nor blocks have to be powers of two; one token may be a whole tile."""
    shape = Shape(((30, 1), (26, 3)), ((0, 0), (0, 24)), 1, group, key_dim, value_dim, block_size)
    check(shape, PLAIN, torch.float32, torch.float32, read_once="always")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("style", "formats", "read_once", "same_bits", "dims"),
    list(
        product(
            STYLES,
            [(d, kv) for d in NEAR for kv in (*NEAR, torch.int8)],
            ["always", "never"],
            [False, True],
            [(64, 64), (128, 128), (256, 256), (192, 128)],
        )
    ),
)
def test_every_combination_is_right(style, formats, read_once, same_bits, dims):
    """The whole grid, at night."""
    shape = replace(MIXED, key_dim=dims[0], value_dim=dims[1])
    check(shape, STYLES[style], *formats, read_once=read_once, same_bits=same_bits)


def test_a_store_keeps_what_the_plain_store_keeps():
    """To the byte, codes and scales of rows that are not finite as well: tiers may mix both."""
    spec, slots = KVSpec((LayerKV(2, 8, 4),)), torch.tensor([5, 0, 33])
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, dim, generator=draw) for dim in (8, 4))
    keys[0, 1, 2], values[2, 0, 1], keys[1, 0] = torch.inf, torch.nan, 0.0
    for dtype in (torch.float32, torch.float16, torch.int8):
        stores: list[Any] = [
            backend.new_store(StoreShape(spec, 2, 16, dtype, torch.device("cpu")))
            for backend in (TritonAttention(), TorchAttention())
        ]
        for store in stores:
            store.write(0, keys, values, slots)
        one, other = (store.block_rows() for store in stores)
        assert all(map(torch.equal, one, other)), dtype


def test_slots_and_blocks_beyond_the_store_are_refused_before_a_kernel_runs():
    scene = Scene(Shape(((20, 3),), block_size=16), torch.float32, TritonAttention())
    scene.tables[0][0] = scene.store.num_blocks + 1
    with pytest.raises(ValueError, match="blocks of a step are between 0 and 4"):
        scene.attend(PLAIN)

    scene.tables[0] = [0, -1 % 2**32]
    with pytest.raises(ValueError, match="of a step are between 0"):
        scene.attend(PLAIN)


def multiply_in_float64(one: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return (one.astype(np.float64) @ other.astype(np.float64)).astype(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """With ``same_bits``: as a decode, as the last row of a chunk, beside sharers or not.

    BLAS adds a row's products in an order that depends on its place; tensor cores do not. In
    float64, rounded once, the interpreter does not either.
    """
    monkeypatch.setattr(np, "matmul", multiply_in_float64)
    shape = Shape(
        ((299, 1), (280, 20), (290, 1)), ((0, 0), (0, 17), (0, 16)), 1, 2, 32, 32, block_size=16
    )
    scene = Scene(shape, dtype, TritonAttention("always", same_bits=True))
    for own, other in zip(scene.whole[1], scene.whole[0], strict=True):
        own[:300] = other[:300]
    scene.queries[20] = scene.queries[0]
    scene.fill()
    together = scene.attend(PLAIN)

    alone = Scene(Shape(((299, 1),), (), 1, 2, 32, 32, block_size=16), dtype, scene.backend)
    alone.whole, alone.queries = scene.whole[:1], scene.queries[:1]
    alone.fill()

    assert torch.equal(together[0], together[20])
    assert torch.equal(together[0], alone.attend(PLAIN)[0])

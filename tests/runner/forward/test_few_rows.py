"""How are a few rows multiplied with a packed weight as fast as it can be read?"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.runner.forward.few_rows import FewRows, Product, for_tiles
from ostinato.runner.forward.packed import PackedWeight
from ostinato.runner.native.library import Isa, best_isa, current_isa, library, use_isa

NATIVE = library()
pytestmark = pytest.mark.skipif(
    NATIVE is None or best_isa(NATIVE) < Isa.AVX512_BF16,
    reason="needs the native library, and a processor that multiplies bfloat16",
)


needs_tiles = pytest.mark.skipif(
    NATIVE is None or best_isa(NATIVE) < Isa.AMX, reason="needs a processor with AMX"
)


@contextmanager
def threads_of_torch(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _isa_as_before() -> Iterator[None]:
    before = current_isa(NATIVE)
    yield
    use_isa(NATIVE, before)


def packed(plain: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(plain, None)


def few_rows(plain: torch.Tensor) -> FewRows:
    few = for_tiles(packed(plain), plain)
    assert few is not None, "oneDNN's tiles lie otherwise on this processor"
    return few


def error_bound(rows: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Half a unit in bfloat16's last place, and float32's error of a long sum."""
    sizes = rows.abs().double() @ weight.abs().double().T
    return exact.abs() * 2**-8 + sizes * rows.shape[1] * 2**-24 + 1e-30


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 128),
    tiles=st.integers(1, 9),
    steps=st.integers(1, 9),
    with_bias=st.booleans(),
    gap=st.sampled_from([0, 8]),
    isa=st.sampled_from([Isa.AVX512_BF16, Isa.AMX]),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_one_in_float64_up_to_rounding(
    num_rows: int, tiles: int, steps: int, with_bias: bool, gap: int, isa: Isa, seed: int
) -> None:
    if isa > best_isa(NATIVE):
        return
    use_isa(NATIVE, isa)
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(32 * tiles, 32 * steps, generator=random).bfloat16()
    rows = torch.randn(num_rows, 32 * steps + gap, generator=random).bfloat16()[:, : 32 * steps]
    bias = torch.randn(32 * tiles, generator=random).bfloat16() if with_bias else None
    few = few_rows(weight)
    if not few.takes(num_rows):
        assert isa < Isa.AMX and num_rows > 8
        return
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = few.multiply(rows, bias).double()
    assert ((found - exact).abs() <= error_bound(rows, weight, exact)).all()


def test_many_rows_are_left_to_onednn_without_tiles() -> None:
    weight = torch.randn(64, 64).bfloat16()
    use_isa(NATIVE, Isa.AVX512_BF16)
    assert few_rows(weight).takes(8) and not few_rows(weight).takes(9)
    rows = torch.randn(129, 64).bfloat16()
    torch.testing.assert_close(
        PackedWeight([weight]).multiply(rows), rows @ weight.T, rtol=2**-7, atol=2**-5
    )


@needs_tiles
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(100, 1300),
    tiles=st.integers(1, 9),
    steps=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 130])),
    with_bias=st.booleans(),
    gap=st.sampled_from([0, 8]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@example(num_rows=961, tiles=7, steps=80, with_bias=False, gap=0, threads=1, seed=0)
@example(num_rows=645, tiles=7, steps=96, with_bias=True, gap=8, threads=1, seed=0)
def test_a_product_of_many_rows_is_the_one_in_float64_up_to_rounding(
    num_rows: int, tiles: int, steps: int, with_bias: bool, gap: int, threads: int, seed: int
) -> None:
    """Rows in one block and in several, chunks of the weight alike and not."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(32 * tiles, 32 * steps, generator=random).bfloat16()
    rows = torch.randn(num_rows, 32 * steps + gap, generator=random).bfloat16()[:, : 32 * steps]
    bias = torch.randn(32 * tiles, generator=random).bfloat16() if with_bias else None
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    with threads_of_torch(threads):
        found = few_rows(weight).multiply(rows, bias).double()
    assert ((found - exact).abs() <= error_bound(rows, weight, exact)).all()


@needs_tiles
def test_every_number_of_rows_agrees_with_onednn() -> None:
    """A row's product does not depend on how many are beside it."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 544, generator=random).bfloat16()  # two chunks, of 8 and of 9 steps
    rows = torch.randn(600, 544, generator=random).bfloat16()
    few = few_rows(weight)
    whole = few.multiply(rows, None)
    torch.testing.assert_close(whole, rows @ weight.T, rtol=2**-7, atol=2**-4)
    for num_rows in range(1, 601):
        assert torch.equal(few.multiply(rows[:num_rows], None), whole[:num_rows]), num_rows


@needs_tiles
def test_rows_of_a_product_do_not_crowd_in_the_cache() -> None:
    weight = few_rows(torch.randn(1024, 32).bfloat16())
    product = weight.multiply(torch.randn(200, 32).bfloat16(), None)
    assert product.shape == (200, 1024) and product.stride() == (1056, 1)


def test_without_products_of_bfloat16_all_rows_are_left_to_onednn() -> None:
    few = few_rows(torch.randn(64, 64).bfloat16())
    use_isa(NATIVE, Isa.AVX2)
    assert not few.takes(1)
    assert for_tiles(packed(torch.ones(64, 64).bfloat16()), torch.ones(64, 64).bfloat16()) is None


@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
def test_sizes_that_tiles_do_not_divide_are_left_to_onednn(shape: tuple[int, int]) -> None:
    plain = torch.randn(shape).bfloat16()
    assert for_tiles(packed(plain), plain) is None


def test_another_format_is_left_to_onednn() -> None:
    plain = torch.randn(64, 64)
    assert for_tiles(packed(plain), plain) is None


def test_tiles_in_another_order_are_noticed() -> None:
    plain = torch.randn(64, 64).bfloat16()
    assert for_tiles(packed(plain.flip(0).contiguous()), plain) is None


def test_new_numbers_in_a_packed_weight_are_multiplied_with() -> None:
    weight = PackedWeight([torch.zeros(64, 64).bfloat16()])
    weight.replace(32, torch.ones(32, 64).bfloat16())
    product = weight.multiply(torch.ones(1, 64).bfloat16())
    assert product.tolist() == [[0.0] * 32 + [64.0] * 32]


def test_the_record_is_as_large_as_the_headers() -> None:
    assert ctypes.sizeof(Product) == 64

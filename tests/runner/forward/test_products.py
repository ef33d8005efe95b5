"""Products with packed weights: the definition in float64, on every instruction set."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.runner.native.library import Isa, library, use_isa
from ostinato.runner.native.packed import PackedWeight, Packing, Product
from tests.support.instruction_sets import ISAS, needs_library, threads_in_use

pytestmark = [needs_library, pytest.mark.usefixtures("module_isa")]

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place."""


def error_bound(rows: Tensor, weight: Tensor, exact: Tensor) -> Tensor:
    """The rounding of a result, and float32's error of a long sum."""
    sizes = rows.abs().double() @ weight.abs().double().T
    subnormal = 2.0**-24 if rows.dtype == torch.float16 else 2.0**-126
    return exact.abs() * UNITS[rows.dtype] + sizes * (rows.shape[1] + 2) * 2**-24 + subnormal


def random_case(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with gaps between them, a weight and a bias."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_inputs + 8, generator=random).to(dtype)[:, :num_inputs]
    weight = torch.randn(num_outputs, num_inputs, generator=random).to(dtype)
    return rows, weight, torch.randn(num_outputs, generator=random).to(dtype)


def check(rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = PackedWeight([weight]).multiply(rows, bias)
    assert (found.dtype, found.shape) == (rows.dtype, exact.shape)
    assert ((found.double() - exact).abs() <= error_bound(rows, weight, exact)).all()


def check_case(
    dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    with_bias: bool,
    threads: int,
    seed: int,
) -> None:
    rows, weight, bias = random_case(num_rows, num_outputs, num_inputs, dtype, seed)
    with threads_in_use(threads):
        check(rows, weight, bias if with_bias else None)


@given(
    dtype=st.sampled_from(FORMATS),
    num_rows=st.integers(0, 100),
    num_outputs=st.integers(1, 200),
    num_inputs=st.integers(1, 200),
    with_bias=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_one_in_float64_up_to_rounding(**case: Any):
    check_case(**case)


@settings(max_examples=8)
@given(
    dtype=st.sampled_from(FORMATS),
    num_rows=st.integers(100, 900),
    num_outputs=st.integers(1, 200),
    num_inputs=st.one_of(st.integers(1, 1300), st.sampled_from([2048, 3072, 4160])),
    with_bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@example(
    dtype=torch.bfloat16, num_rows=961, num_outputs=224, num_inputs=2560, with_bias=False,
    threads=1, seed=0,
)  # fmt: skip
@example(
    dtype=torch.float32, num_rows=645, num_outputs=224, num_inputs=3072, with_bias=True,
    threads=2, seed=0,
)  # fmt: skip
def test_a_product_of_many_rows_is_the_one_in_float64_up_to_rounding(**case: Any):
    """Rows in one block and in several, chunks of the weight alike and not."""
    check_case(**case)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", [(96, 544), (70, 45), (416, 1024)])
def test_a_row_alone_has_the_product_that_it_has_in_a_batch_of_any_size(
    sizes: tuple[int, int], dtype: torch.dtype
):
    """To the bit, on any number of threads: no request depends on the requests beside it."""
    rows, weight, bias = random_case(430, *sizes, dtype)
    packed = PackedWeight([weight])
    whole = packed.multiply(rows, bias)
    for row in (0, 1, 77, 429):
        assert torch.equal(packed.multiply(rows[row : row + 1], bias)[0], whole[row])
    for num_rows in (*range(2, 72), 96, 97, 150, 384, 429):
        with threads_in_use(num_rows % 3 + 1):
            first, last = (
                packed.multiply(each, bias) for each in (rows[:num_rows], rows[-num_rows:])
            )
        assert torch.equal(first, whole[:num_rows]), num_rows
        assert torch.equal(last, whole[-num_rows:]), num_rows


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", [(1, 1), (33, 7), (64, 64), (95, 130)])
def test_a_weight_comes_out_of_its_tiles_as_it_went_in(sizes: tuple[int, int], dtype: torch.dtype):
    weight = torch.randn(sizes).to(dtype)
    packed = PackedWeight([weight])
    assert torch.equal(packed.plain(), weight)
    assert torch.equal(packed.plain(sizes[0] // 2, sizes[0]), weight[sizes[0] // 2 :])


def test_a_weight_packed_for_one_instruction_set_is_multiplied_by_the_others(module_isa: Isa):
    """There is one order of tiles, so that sets can change while a model is loaded."""
    rows, weight, _ = random_case(20, 64, 64, torch.bfloat16)
    packed = PackedWeight([weight])
    native = library()
    assert native is not None
    try:
        for other in ISAS:
            use_isa(native, other)
            found = packed.multiply(rows).double()
            assert torch.allclose(found, rows.double() @ weight.double().T, rtol=2**-7, atol=0.05)
    finally:
        use_isa(native, module_isa)


def test_new_numbers_in_a_packed_weight_are_multiplied_with():
    weight = PackedWeight([torch.zeros(64, 64).bfloat16()])
    weight.replace(31, torch.ones(32, 64).bfloat16())
    product = weight.multiply(torch.ones(1, 64).bfloat16())
    assert product.tolist() == [[0.0] * 31 + [64.0] * 32 + [0.0]]


def test_rows_of_a_product_do_not_crowd_in_the_cache():
    weight = PackedWeight([torch.randn(1024, 32).bfloat16()])
    product = weight.multiply(torch.randn(200, 32).bfloat16())
    assert product.shape == (200, 1024) and product.stride() == (1056, 1)


def test_a_row_whose_end_cannot_be_read_is_refused():
    """A product reads rows up to a multiple of 32 numbers."""
    weight = PackedWeight([torch.randn(32, 40)])
    with pytest.raises(AssertionError, match="a row's end is read"):
        weight.record(torch.zeros(2, 40), None, torch.zeros(2, 32))


def test_records_are_as_large_as_the_headers():
    assert ctypes.sizeof(Product) == 128
    assert ctypes.sizeof(Packing) == 56

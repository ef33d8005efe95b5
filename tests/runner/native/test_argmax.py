"""The largest number of each row, first of several, as NumPy finds it."""

import numpy as np
import pytest
import torch

from ostinato.runner.native.argmax import argmax, takes

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 511, 1025, 32_000])
def test_it_is_the_first_of_the_largest(dtype: torch.dtype, width: int):
    """So few different numbers that there are always several."""
    random = np.random.default_rng(width)
    whole = torch.from_numpy(random.integers(-5, 1, size=(9, width + 3)).astype(np.float32))
    whole[whole == 0] *= torch.tensor(-1.0)  # zeros are below zero, and no smaller for it
    whole[::2, :-7:5].abs_()
    rows = whole.to(dtype)[:, 2 : width + 2]
    assert argmax(rows) == rows.float().numpy().argmax(1).tolist()
    assert argmax(rows.t().contiguous().t()) == argmax(rows)


def test_so_many_rows_that_threads_share_them():
    rows = torch.zeros(80, 32_000, dtype=torch.bfloat16)
    places = np.random.default_rng(0).integers(32_000, size=80)
    rows[torch.arange(80), torch.from_numpy(places)] = 1.0
    assert argmax(rows) == places.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_a_finite_largest_number_have_none(dtype: torch.dtype):
    rows = torch.zeros(6, 700, dtype=dtype)
    rows[0, 600], rows[1, 600], rows[2, 600] = float("nan"), -float("nan"), float("inf")
    rows[3] = float("-inf")
    rows[4] = float("-inf")
    rows[4, 650] = torch.finfo(dtype).min
    assert argmax(rows) == [-1, -1, -1, -1, 650, 0]


def test_no_rows_have_no_places_and_other_formats_are_not_taken():
    assert argmax(torch.zeros(0, 5)) == []
    assert not takes(torch.zeros(2, 5, dtype=torch.float64))
    assert not takes(torch.zeros(2, 0))

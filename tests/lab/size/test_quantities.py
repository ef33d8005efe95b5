"""What tables print can be typed again."""

import pytest

from ostinato.core.errors import ConfigError
from ostinato.lab.size.quantities import read_bytes, read_count, write_bytes, write_count


@pytest.mark.parametrize(
    ("num", "text"),
    [(1, "1"), (999, "999"), (1000, "1k"), (2500, "2.5k"), (40_148, "40.1k"), (170_899, "171k"),
     (999_999, "1M"), (1_500_000, "1.5M"), (3 * 10**9, "3G")],
)  # fmt: skip
def test_numbers_are_written_with_three_digits_and_read_again(num, text):
    assert write_count(num) == text
    assert read_count("capacity", text) == pytest.approx(num, rel=0.005)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1023, "1,023 B"), (1024, "1 KiB"), (70_272, "68.6 KiB"), (2**20 - 1, "1 MiB"),
     (1_500_000_000, "1.4 GiB"), (465 * 2**30, "465 GiB"), (5000 * 2**40, "5,000 TiB")],
)  # fmt: skip
def test_memory_is_written_with_three_digits_and_read_again(num_bytes, text):
    assert write_bytes(num_bytes) == text
    for spelled in (text, text.replace(" ", "")):
        assert read_bytes("memory", spelled.replace(",", "")) == pytest.approx(num_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("80GB", 80 * 10**9),
     ("1.5TiB", 3 * 2**39), ("0.1MB", 100_000)],
)  # fmt: skip
def test_amounts_of_memory_are_read_with_decimal_and_binary_units(text, num_bytes):
    assert read_bytes("memory", text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24G", "24 XB", "0", "1e9", "0.1B"])
def test_amounts_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="memory="):
        read_bytes("memory", text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "1.0005k", "k", "2 blocks"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        read_count("capacity", text)

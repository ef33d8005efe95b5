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


@pytest.mark.parametrize("num_bytes", [64 * 2**10, 2**30, 2**34, int(2.94 * 2**40)])
def test_memory_is_read_as_it_is_written(num_bytes):
    text = write_bytes(num_bytes)
    assert read_bytes("memory", text) == pytest.approx(num_bytes, rel=0.005)
    assert read_bytes("memory", text.replace(" ", "")) == read_bytes("memory", text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "1.0005k", "k", "2 blocks"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        read_count("capacity", text)

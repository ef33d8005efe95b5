"""Public traces of block hashes are read whatever their block size, hashes and unit of time."""

import gzip
import json
import tracemalloc

import pytest

from ostinato.errors import BrokenTrace, ConfigError
from ostinato.lab.traces import trace_builder
from ostinato.lab.traces.hash_traces import read_hash_trace
from ostinato.lab.traces.traces import ReadOptions, read_trace

# The first lines of Mooncake's conversation trace, their hash_ids cut down to the lengths.
MOONCAKE = [
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [*range(14)]},
    {"timestamp": 0, "input_length": 7322, "output_length": 490, "hash_ids": [0, *range(14, 28)]},
    {"timestamp": 3000, "input_length": 2000, "output_length": 5, "hash_ids": [0, 28, 29, 30]},
]
# In the form of Alibaba's: blocks of 16 tokens, seconds with fractions, chats by their parent.
BAILIAN = [
    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 52, "turn": 1,
     "output_length": 13, "type": "text", "hash_ids": [1089, 1090, 1091, 6326]},
    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 92.5, "input_length": 90, "turn": 2,
     "output_length": 40, "type": "text", "hash_ids": [1089, 1090, 1091, 44, 45, 46]},
]  # fmt: skip


def seconds_covered(trace):
    """How long the trace's own timestamps say that it lasts: no clock runs here."""
    return trace.duration_s


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncakes_blocks_are_of_512_tokens_and_its_times_milliseconds(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", MOONCAKE))
    assert (trace.block_tokens, seconds_covered(trace)) == (512, 3.0)
    assert [len(path) for path in trace.paths()] == [13, 14, 3]  # partial blocks are left out
    assert trace.notes == ("Timestamps are read as milliseconds.",)


def test_bailians_blocks_are_of_16_tokens_and_its_times_seconds(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", BAILIAN))
    assert trace.block_tokens == 16 and seconds_covered(trace) == pytest.approx(31.386)
    assert trace.paths() == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert trace.notes == ("Timestamps are read as seconds.",)


def test_hashes_may_be_strings_or_integers_of_any_size(tmp_path):
    """As engines write them: hexadecimal digests, signed 64 bits, or more."""
    numbers = read_trace(write(tmp_path / "n.jsonl", MOONCAKE))
    for name in (lambda n: f"sha256:{n:064x}", lambda n: -(2**62) + n, lambda n: 2**200 + n):
        rows: list[dict] = [row.copy() for row in MOONCAKE]
        for row in rows:
            row["hash_ids"] = [name(n) for n in row["hash_ids"]]
        assert read_trace(write(tmp_path / "t.jsonl", rows)).paths() == numbers.paths()


@pytest.mark.parametrize("block", [1, 8, 16, 64, 128, 256, 512, 1024, 4096])
@pytest.mark.parametrize("keeps_partial", [True, False])
def test_the_block_size_is_derived_from_lengths_and_numbers_of_hashes(
    tmp_path, block, keeps_partial
):
    lengths = [block * 40 + 3, block * 7 + 1, block * 90 + block // 2, block * 3 - 1]
    rows = []
    for number, length in enumerate(lengths):
        num_hashes = -(-length // block) if keeps_partial else length // block
        hashes = [1000 * number + place for place in range(num_hashes)]
        times = {"timestamp": number * 100, "output_length": 1}
        rows.append({**times, "input_length": length, "hash_ids": hashes})
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.block_tokens == block
    assert [len(path) for path in trace.paths()] == [length // block for length in lengths]


def test_a_block_size_is_said_where_it_is_no_power_of_two_and_checked_where_it_is(tmp_path):
    odd = [{**MOONCAKE[0], "input_length": 48 * n, "hash_ids": [*range(n)]} for n in (9, 20, 33)]
    path = write(tmp_path / "odd.jsonl", odd)
    with pytest.raises(ConfigError, match=r"not a power of two.*give --block-size"):
        read_trace(path)
    assert read_trace(path, ReadOptions(block_tokens=48)).block_tokens == 48
    path = write(tmp_path / "t.jsonl", MOONCAKE)
    with pytest.raises(ConfigError, match=r"block_size=16: t.jsonl lists blocks of 512 tokens"):
        read_trace(path, ReadOptions(block_tokens=16))


@pytest.mark.parametrize(
    ("times", "unit", "span_s"),
    [
        ([0, 3000, 6000], "milliseconds", 6.0),
        ([0, 1, 1, 1, 2], "seconds", 2.0),  # 2,500 requests per second otherwise
        ([0.5, 60.25], "seconds", 59.75),
        ([1_700_000_000, 1_700_000_060], "seconds", 60.0),
        ([1_700_000_000_000, 1_700_000_060_000], "milliseconds", 60.0),
        ([1_700_000_000_000_000, 1_700_000_060_000_000], "microseconds", 60.0),
    ],
)
def test_the_unit_of_time_is_derived_and_said(tmp_path, times, unit, span_s):
    path = write(tmp_path / "t.jsonl", [{**MOONCAKE[2], "timestamp": at} for at in times])
    trace = read_trace(path)
    assert trace.notes == (f"Timestamps are read as {unit}.",)
    assert seconds_covered(trace) == pytest.approx(span_s)
    in_ns = read_trace(path, ReadOptions(unit="ns"))
    assert seconds_covered(in_ns) == pytest.approx((times[-1] - times[0]) / 1e9)


def test_a_packed_trace_is_read_and_a_torn_one_refused(tmp_path):
    plain = write(tmp_path / "t.jsonl", MOONCAKE)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).paths() == read_trace(plain).paths()
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(BrokenTrace, match=r"t\.jsonl\.gz"):
        read_trace(packed)


def test_a_hash_under_several_parents_is_several_blocks(tmp_path, monkeypatch):
    """Names that are not chained: the same block text after different prefixes, over batches."""
    monkeypatch.setattr(trace_builder, "NAMES_PER_BATCH", 3)
    row = {"timestamp": 0, "input_length": 4 * 512, "output_length": 1}
    names = [["a", "x", "y", "z"], ["b", "x", "y", "z"], ["a", "x", "y", "q"], ["b", "x", "c", "z"]]
    trace = read_trace(write(tmp_path / "t.jsonl", [{**row, "hash_ids": each} for each in names]))
    assert trace.paths() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 8], [4, 5, 9, 10]]


def test_memory_is_a_few_bytes_per_hash_however_long_the_trace(tmp_path, monkeypatch):
    """4 bytes per hash and 8 per distinct one, twice where arrays grow, and what a batch takes."""
    monkeypatch.setattr(trace_builder, "NAMES_PER_BATCH", 20_000)
    path, num_hashes, chat = tmp_path / "t.jsonl", 0, 0
    with path.open("w") as file:
        while num_hashes < 600_000:
            first = chat * 300
            for turn in range(1, 4):
                hashes = list(range(first, first + 100 * turn))
                num_hashes += len(hashes)
                row = {"timestamp": chat * 10 + turn, "input_length": 16 * len(hashes)}
                file.write(json.dumps({**row, "output_length": 1, "hash_ids": hashes}) + "\n")
            chat += 1
    tracemalloc.start()
    trace = read_hash_trace(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.num_lookups == num_hashes and trace.num_distinct == num_hashes // 2
    assert kept < 4 * num_hashes + 200 * len(trace) + 500_000
    assert peak < 24 * num_hashes + 100 * 20_000

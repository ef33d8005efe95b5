"""Every kind of trace becomes the same: requests as rows of blocks, each with one parent."""

import json
from array import array

import numpy as np
import pytest

from ostinato.core.config import SchedulerConfig
from ostinato.errors import BrokenTrace, ConfigError
from ostinato.lab.traces.traces import ReadOptions, read_trace
from ostinato.settings import PrefixCacheConfig
from ostinato.traces.anonymizer import TokenHasher
from ostinato.traces.format import (
    VERSION,
    Added,
    Ended,
    SequenceEnd,
    Stopped,
    TraceHeader,
    write_line,
)
from tests.lab.traces.small_traces import write_mooncake, write_npz

ROWS = [
    (0, 1100, 20, [7, 8, 9]),
    (500, 1024, 5, [7, 8]),
    (250, 513, 5, [7, 30]),
    (3000, 100, 5, [31]),
]


def by_letters(body):
    """A tokenizer: a letter per token."""
    if "prompt" in body:
        return [ord(letter) for letter in body["prompt"]]
    return [ord(letter) for message in body["messages"] for letter in message["content"]]


def test_mooncakes_partial_blocks_are_left_out_and_requests_stand_by_arrival(tmp_path):
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", ROWS))
    assert trace.paths() == [[0, 1], [0], [0, 1], []]
    assert trace.input_tokens.tolist() == [1100, 513, 1024, 100]
    assert trace.arrival_s.tolist() == [0, 0.25, 0.5, 3.0]
    assert (trace.block_tokens, trace.num_distinct, trace.num_lookups) == (512, 2, 5)


def test_arrays_and_lines_of_the_same_traffic_are_the_same_trace(tmp_path):
    lines = read_trace(write_mooncake(tmp_path / "t.jsonl", ROWS))
    arrays = read_trace(write_npz(tmp_path / "t.npz", lines))
    assert arrays.paths() == lines.paths()
    assert arrays.arrival_s.tolist() == lines.arrival_s.tolist()
    assert arrays.input_tokens.tolist() == lines.input_tokens.tolist()


def row(timestamp=1, length=5, ids="[1]"):
    """Write a line of Mooncake's as it may go wrong."""
    lengths = f'"input_length": {length}, "output_length": 1'
    return f'{{"timestamp": {timestamp}, {lengths}, "hash_ids": {ids}}}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "this is no JSON"),
        ("[1]", "this is list, not an object"),
        (row(length=-5), "input_length=-5"),
        (row(ids="[1.5]"), "hash_ids must be"),
        (row(ids="[1, 2]"), "2 hash_ids for 5"),
        (row(timestamp='"x"'), "timestamp='x'"),
    ],
)
def test_a_broken_line_is_refused_by_its_number_or_named_and_left_out(tmp_path, line, reason):
    path = write_mooncake(tmp_path / "t.jsonl", ROWS[:2])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(BrokenTrace, match=r"t.jsonl, line 4: .*on_broken='skip'") as refused:
        read_trace(path)
    assert reason in str(refused.value)
    trace = read_trace(path, ReadOptions(on_broken="skip"))
    assert len(trace) == 2
    [broken] = trace.broken
    assert broken.number == 4 and reason in broken.reason


def test_a_file_without_a_line_that_can_be_read_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(BrokenTrace, match="No such file"):
        read_trace(path)
    path.write_text("\n\n")
    with pytest.raises(BrokenTrace, match=r"t.jsonl: .*it is empty"):
        read_trace(path)
    path.write_text("root:x:0:0\n[1]\n")
    with pytest.raises(BrokenTrace, match=r"neither a trace nor a log of requests"):
        read_trace(path)
    path.write_text('{"hash_ids": 1}\n')
    with pytest.raises(BrokenTrace, match=r"no line of it can be read: line 1"):
        read_trace(path, ReadOptions(on_broken="skip"))
    (tmp_path / "t.npz").write_text("no arrays")
    with pytest.raises(BrokenTrace, match="no trace of arrays"):
        read_trace(tmp_path / "t.npz")
    with pytest.raises(BrokenTrace, match="No such file"):
        read_trace(tmp_path / "nowhere.npz")


def test_a_torn_first_line_does_not_hide_what_a_file_is(tmp_path):
    path = write_mooncake(tmp_path / "t.jsonl", ROWS)
    path.write_text('{"timest\n' + path.read_text())
    with pytest.raises(BrokenTrace, match=r"t.jsonl, line 1: this is no JSON"):
        read_trace(path)
    trace = read_trace(path, ReadOptions(on_broken="skip"))
    assert len(trace) == len(ROWS) and [line.number for line in trace.broken] == [1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ts_ms": np.array([0.0, np.nan])}, "ts_ms must be a row of whole numbers"),
        ({"ts_ms": np.array([[0, 1]])}, "ts_ms must be a row of whole numbers"),
        ({"ids": np.array([-1])}, "ids has -1"),
        ({"offsets": np.array([1, 1, 1])}, "do not fit together"),
        ({"input_len": np.array([600, -1])}, "t.npz: a prompt of -1 tokens"),
        ({"output_len": np.array([2**50, 1])}, "from 0 to 100,000,000"),
    ],
)
def test_arrays_that_no_traffic_has_are_refused(tmp_path, changed, reason):
    arrays = {
        "ts_ms": np.array([0, 1]),
        "input_len": np.array([600, 5]),
        "output_len": np.array([1, 1]),
        "offsets": np.array([0, 1, 1]),
        "ids": np.array([0]),
    }
    np.savez(tmp_path / "t.npz", **arrays)
    assert read_trace(tmp_path / "t.npz").paths() == [[0], []]
    np.savez(tmp_path / "t.npz", **(arrays | changed))
    with pytest.raises(BrokenTrace, match=reason):
        read_trace(tmp_path / "t.npz")
    whole = (tmp_path / "t.npz").read_bytes()
    (tmp_path / "t.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BrokenTrace, match="no trace of arrays"):
        read_trace(tmp_path / "t.npz")


def test_a_line_without_a_time_comes_after_the_one_before_it(tmp_path):
    """Otherwise a log of today would begin in 1970."""
    path = tmp_path / "log.jsonl"
    times = [None, 1_700_000_000, None, 1_700_000_060]
    lines = [{"prompt": "abcd"} | ({} if at is None else {"timestamp": at}) for at in times]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path, ReadOptions(tokenizer=by_letters))
    assert trace.arrival_s.tolist() == [0, 0, 1, 60]
    path.write_text("\n".join(json.dumps({"prompt": "abcd"}) for _ in range(3)))
    assert read_trace(path, ReadOptions(tokenizer=by_letters)).arrival_s.tolist() == [0, 1, 2]


def test_a_log_of_requests_is_cut_into_blocks_per_tenant(tmp_path):
    """Two tenants share nothing, a batch line is unwrapped, and times are seconds."""
    chat = {"messages": [{"role": "user", "content": "ABCDEFGH"}], "max_tokens": 3}
    lines = [
        {"timestamp": 10, "body": chat},
        {"timestamp": 12, "prompt": "ABCDxyz"},
        {"timestamp": 13, "tenant": "ann", "body": {"prompt": "ABCD"}, "answer": "four"},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path, ReadOptions(block_tokens=4, tokenizer=by_letters))
    assert trace.paths() == [[0, 1], [0], [2]]
    assert trace.output_tokens.tolist() == [3, 1, 4]
    assert trace.arrival_s.tolist() == [0, 2, 3]
    with pytest.raises(ConfigError, match="give a model, for its tokenizer"):
        read_trace(path)


def test_a_prompt_that_cannot_be_tokenized_is_a_broken_line(tmp_path):
    """The tokenizer knows letters below 128 alone, and no tokens are no prompt."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "AB"}\n{"prompt": "\u00e4"}\n{"prompt": ""}\n')
    options = ReadOptions(4, "skip", lambda body: body["prompt"].encode("ascii"))
    broken = read_trace(path, options).broken
    assert [line.number for line in broken] == [2, 3]
    assert [line.reason[:24] for line in broken] == [
        "the prompt cannot be tok",
        "the prompt has no tokens",
    ]


def test_a_recorded_trace_has_its_answers_as_blocks_for_the_next_turn(tmp_path):
    """The second turn begins with the first one's prompt and answer."""
    names = TokenHasher()
    first, second = array("I", range(1, 7)), array("I", range(1, 13))
    chain = names.prompt(first)
    answer = chain.continued(array("I", [7, 8, 9]))
    header = TraceHeader(
        version=VERSION,
        cache=PrefixCacheConfig(num_blocks=9, block_size=4),
        scheduler=SchedulerConfig(),
        model={"token_bytes": 64},
        is_cold=True,
        epoch=0,
        start_us=0,
        unix_s=0.0,
    )
    end = SequenceEnd(output=answer, reason="length")
    lines = [
        header,
        Added(step=0, at_us=0, arrival_us=0, request=0, prompt=bytes(chain.names)),
        Ended(step=3, at_us=9, request=0, cached=0, copied=0, was_admitted=True, sequences=(end,)),
        Added(step=3, at_us=9, arrival_us=9, request=1, prompt=bytes(names.prompt(second).names)),
        Stopped(step=3, at_us=9),
    ]
    path = tmp_path / "t"
    path.write_bytes(b"".join(map(write_line, lines)))
    trace = read_trace(path)
    assert trace.paths() == [[0, 1], [0, 1, 2]]
    assert trace.prompt_blocks.tolist() == [1, 3]
    assert (trace.block_tokens, trace.token_bytes) == (4, 64)
    assert read_trace(path, ReadOptions(block_tokens=2)).paths()[0] == [0, 1, 2, 3]


def test_a_trace_of_a_newer_version_is_refused(tmp_path):
    header = {"event": "header", "version": 99, "model": {}, "is_cold": True, "epoch": 0}
    header |= {"cache": {"num_blocks": 1}, "scheduler": {}, "start_us": 0, "unix_s": 0}
    (tmp_path / "t").write_text(json.dumps(header))
    with pytest.raises(BrokenTrace, match="version 99 and this Ostinato reads up to 2"):
        read_trace(tmp_path / "t")

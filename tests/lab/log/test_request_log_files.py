"""Files of logged requests: lines, arrays, packed, damaged and long."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from ostinato.errors import BrokenTrace
from ostinato.lab.log import lines
from ostinato.lab.log.request_log import LogOptions, iter_requests, read_request_log, render_plainly
from tests.lab.log.logged_requests import CHAT, parse_request, rendered, write


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_arrays_and_gzip_are_read_like_lines(tmp_path: Path, indent, packed):
    said = [
        {**CHAT, "messages": [{"role": "user", "content": f'"{n}" ]}}{{[\\'}]} for n in range(9)
    ]
    plain = read_request_log(write(tmp_path / "log.jsonl", said))
    data = ("\ufeff" + json.dumps(said, indent=indent)).encode()
    path = tmp_path / "log.json"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_request_log(path).requests == plain.requests


def test_an_array_longer_than_a_chunk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "CHUNK_BYTES", 7)
    said = [{**CHAT, "messages": [{"role": "user", "content": "[{" * n}]} for n in range(40)]
    path = tmp_path / "log.json"
    path.write_text(json.dumps(said))
    assert [r.prompt.head for r in read_request_log(path).requests] == [""] * 40
    assert len(render_plainly(read_request_log(path).requests[39])) > 78


def broken_file(kind: str) -> bytes:
    good = json.dumps(CHAT).encode()
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return {
        "gzip": gzip.compress(b"\n".join([good] * 9_000))[:-40],
        "utf-8": good + b"\n" + good.replace(b"Who", b"\xff\xfe\xfd"),
        "nesting": good + b"\n" + deep,
        "array": b"[" + good + b", " + good[:-9],
        "numbers": b"[" + good + b", 5, 6]",
        "utf-16": good.decode().encode("utf-16"),
        "empty": b"\n \n",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gzip", "the gzip file is truncated or damaged"),
        ("utf-8", "line 2: it is not valid UTF-8 at byte"),
        ("nesting", "line 2: it is nested too deeply"),
        ("array", "line 2: the array ends before its bracket"),
        ("numbers", "line 2: the array holds b'5, 6', which is no object"),
        ("utf-16", "is UTF-16: convert it to UTF-8"),
        ("empty", "no line of it can be read: it is empty"),
    ],
)
def test_damaged_files_are_refused_with_what_is_wrong(tmp_path: Path, kind, reason):
    path = tmp_path / "log.jsonl"
    path.write_bytes(broken_file(kind))
    with pytest.raises(BrokenTrace, match=reason):
        read_request_log(path)
    if kind in ("utf-16", "empty"):
        return
    log = read_request_log(path, LogOptions("skip"))
    assert len(log.broken) == 1 and len(log.requests) >= 1


def test_a_json_text_in_a_string_may_be_nested_as_deeply(tmp_path: Path):
    inner = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path = write(tmp_path / "log.jsonl", [{"request_body": inner}, CHAT])
    assert len(read_request_log(path, LogOptions("skip")).requests) == 1


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_halves_of_letters_do_not_reach_the_prompt(is_wrapped):
    record = '{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    record = json.dumps({"request_body": record}) if is_wrapped else record
    assert render_plainly(parse_request(record.encode(), 1)).count("\ufffd") == 1


@pytest.mark.parametrize("form", ["line", "array"])
def test_a_record_over_the_limit_is_skipped_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form
):
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 2**20)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 2**16)
    long = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 2**24}]})
    path = tmp_path / "log.json"
    path.write_text(f"[{json.dumps(CHAT)}, {long}]" if form == "array" else
                    f"{json.dumps(CHAT)}\n{long}\n{json.dumps(CHAT)}")  # fmt: skip
    tracemalloc.start()
    log = read_request_log(path, LogOptions("skip"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(log.requests) == (2 if form == "line" else 1)
    assert "the record has more than 1 MiB" in log.broken[0].reason
    assert peak < 8 * 2**20


def peak_of(path: Path, num_records: int, form: str) -> int:
    """Peak memory of reading a log of long prompts one request at a time."""
    body = {"model": "m", "input": "word " * 2000}
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("[" if form == "array" else "")
        for number in range(num_records):
            file.write("," if number and form == "array" else "")
            response = {"id": f"resp_{number}", "output": []}
            file.write(json.dumps({"body": body, "response": response}) + "\n")
        file.write("]" if form == "array" else "")
    tracemalloc.start()
    assert sum(1 for _ in iter_requests(path, LogOptions())) == num_records
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("form", ["lines", "array"])
def test_memory_does_not_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form):
    """Prompts of 10 kB whose responses have names, which later ones could refer to."""
    monkeypatch.setattr("ostinato.lab.log.request_log.Conversations.MAX_LETTERS", 2**18)
    small, large = (peak_of(tmp_path / "log.gz", n, form) for n in (400, 1600))
    assert large < 1.2 * small < 16 * 2**20


def test_reading_stops_at_a_limit_of_text(tmp_path: Path):
    path = write(tmp_path / "log.jsonl", [CHAT] * 9)
    length = len(rendered(CHAT))
    log = read_request_log(path, max_letters=3 * length)
    assert log.is_cut and len(log.requests) == 3
    assert not read_request_log(path, max_letters=9 * length).is_cut

"""Reads the records of a log: lines of JSON or one JSON array, gzipped or not.

Records are read one at a time, so memory does not grow with the file. An invalid record is reported
with its number, and refused or skipped: a log of a million requests is still useful without its
truncated last line.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TypeVar

from ostinato.errors import BrokenTrace

OnBroken = Literal["refuse", "skip"]

MAX_RECORD_BYTES = 64 * 2**20
"""Maximum bytes of a record; a longer one is refused before it is in memory."""

CHUNK_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{}]', re.DOTALL)
"""Tokens that matter for nesting: strings and brackets; a lone quote is a truncated string."""

_File = BufferedReader | gzip.GzipFile

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A record that was skipped.

    Attributes:
        number: Its line in the file, or its place in the array, counted from 1.
        reason: What is wrong with it.
    """

    number: int
    reason: str


def iter_lines(
    path: Path,
    parse: Callable[[int, bytes], ItemT],
    on_broken: OnBroken,
    broken: list[BrokenLine],
) -> Iterator[ItemT]:
    """Read the records of a file one at a time; blank lines are skipped.

    Args:
        path: The file.
        parse: Reads one record, given its number; raises ``BrokenTrace`` if it cannot.
        on_broken: Whether to stop at an invalid record, or to skip it.
        broken: Receives the skipped records.

    Raises:
        BrokenTrace: The file cannot be opened, no record can be read, or one cannot and
            ``on_broken`` is ``refuse``; the message names the line.
    """
    num_read = 0
    for number, record in _records(path):
        try:
            if isinstance(record, BrokenTrace):
                raise record
            item = parse(number, record)
        except (BrokenTrace, RecursionError) as error:
            reason = str(error) if isinstance(error, BrokenTrace) else "it is nested too deeply"
            if on_broken == "refuse":
                raise BrokenTrace(
                    f"{path.name}, line {number}: {reason}; --skip-broken (on_broken='skip') "
                    "leaves it out"
                ) from error
            broken.append(BrokenLine(number, reason))
            continue
        num_read += 1
        yield item
    if not num_read:
        reason = f": line {broken[0].number}: {broken[0].reason}" if broken else ": it is empty"
        raise BrokenTrace(f"{path.name}: no line of it can be read{reason}")


def read_object(line: bytes) -> dict[str, Any]:
    """Read a record that is a JSON object.

    Raises:
        BrokenTrace: It is none.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BrokenTrace(f"this is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BrokenTrace(f"this is {type(fields).__name__}, not an object")
    return fields


def _records(path: Path) -> Iterator[tuple[int, bytes | BrokenTrace]]:
    """Yield numbered records of a file; if it is damaged, the last one is an error."""
    number = 0
    try:
        with _open(path) as file:
            start = file.peek(16)
            if start.startswith(_UTF16_MARKS):
                raise BrokenTrace(f"{path.name} is UTF-16: convert it to UTF-8")
            if start.startswith(_UTF8_MARK):
                file.read(len(_UTF8_MARK))
            is_array = file.peek(64).lstrip().startswith(b"[")
            records = _elements(file) if is_array else _lines(file)
            for number, record in enumerate(records, 1):
                if isinstance(record, BrokenTrace) or record.strip():
                    yield number, record
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield number + 1, BrokenTrace(f"the gzip file is truncated or damaged: {error}")
    except OSError as error:
        raise BrokenTrace(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> _File:
    file = path.open("rb")
    if file.peek(2)[:2] != _GZIP:
        return file
    file.close()
    return gzip.open(path, "rb")


def _lines(file: _File) -> Iterator[bytes | BrokenTrace]:
    while line := file.readline(MAX_RECORD_BYTES + 1):
        if len(line) <= MAX_RECORD_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
        yield _too_long()


def _elements(file: _File) -> Iterator[bytes | BrokenTrace]:
    """Yield the elements of a JSON array; each is an object.

    A string that is cut off at the end of the buffer is matched again when there is more; chunks
    double meanwhile, so that long strings cost linear time.
    """
    buffer, at, start, depth, size = b"", 0, 0, 0, CHUNK_BYTES
    while True:
        token = _TOKEN.search(buffer, at)
        if token is None or token.group() == b'"':
            at = len(buffer) if token is None else token.start()
            more = file.read(size)
            if not more or at - start > MAX_RECORD_BYTES or size > MAX_RECORD_BYTES:
                yield _too_long() if more else BrokenTrace("the array ends before its bracket")
                return
            buffer, at, start, size = buffer[start:] + more, at - start, 0, 2 * size
            continue
        size, at = CHUNK_BYTES, token.end()
        depth += (token.group() in b"{[") - (token.group() in b"}]")
        if depth == 1:
            start, element = at, buffer[start:at].lstrip(b", \t\r\n")
            if element.startswith(b"{"):
                yield element
            elif element != b"[":
                yield BrokenTrace(f"the array holds {element[:20]!r}, which is no object")
                return
        elif depth == 0:
            if left := buffer[start : at - 1].strip(b"[, \t\r\n"):
                yield BrokenTrace(f"the array holds {left[:20]!r}, which is no object")
            return


def _too_long() -> BrokenTrace:
    return BrokenTrace(f"the record has more than {MAX_RECORD_BYTES >> 20} MiB")

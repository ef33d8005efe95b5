"""What becomes of the lines of a file that cannot be read?

They are named, with their number and what is wrong with them, and then skipped or refused, as
asked: a log of a million requests is still worth reading without its torn last line, but never
in silence.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from ostinato.core.errors import BrokenTrace

OnBroken = Literal["refuse", "skip"]

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that was skipped.

    Attributes:
        number: Counted from 1.
        reason: What is wrong with it.
    """

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadLines(Generic[ItemT]):
    """What a file's lines said.

    Attributes:
        items: One per line that could be read, in order.
        broken: Those that could not.
    """

    items: list[ItemT]
    broken: tuple[BrokenLine, ...]


def read_lines(
    path: Path, parse: Callable[[bytes], ItemT], on_broken: OnBroken = "refuse"
) -> ReadLines[ItemT]:
    """Read all lines of a file; see ``iter_lines``."""
    broken: list[BrokenLine] = []
    items = iter_lines(path, lambda _number, line: parse(line), on_broken, broken)
    return ReadLines(list(items), tuple(broken))


def iter_lines(
    path: Path,
    parse: Callable[[int, bytes], ItemT],
    on_broken: OnBroken,
    broken: list[BrokenLine],
) -> Iterator[ItemT]:
    """Read a file line by line, unpacked if its name ends in ``.gz``; empty lines are skipped.

    Args:
        path: The file.
        parse: Reads one line, given its number; raises ``BrokenTrace`` if it cannot.
        on_broken: Whether a line that cannot be read ends the reading or is left out.
        broken: Gets the lines that were left out.

    Raises:
        BrokenTrace: The file cannot be opened, no line can be read, or one cannot and
            ``on_broken`` is ``refuse``; the message names the line.
    """
    num_read = 0
    for number, line in _numbered(path):
        if not line.strip():
            continue
        try:
            item = parse(number, line)
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


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from enumerate(file, 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BrokenTrace(f"{path}: {reason}") from error

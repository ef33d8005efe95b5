"""What a check raises: a mistake with its kind, the smallest input that shows it, and a picture."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from types import ModuleType
from typing import Any

BLOCK = 2
"""Tokens per block in the checks, so that counterexamples are short."""


class Mistake(Exception):
    """Something that a lab's file does wrong."""

    def __init__(self, kind: str, what: str, picture: Iterable[str] = (), why: str = "") -> None:
        """Describe it.

        Args:
            kind: Its name, in words that are joined by hyphens.
            what: One sentence: what the code does.
            picture: The input that shows it, and what comes out; one line each.
            why: One sentence: what goes wrong with a model if it is left so.
        """
        super().__init__(what)
        self.kind, self.what, self.picture, self.why = kind, what, tuple(picture), why


class Story(list[str]):
    """What a check did so far, in a line each; shown if the code raises."""

    def begin(self, call: str, *before: str) -> str:
        """Forget what was done before, note a call and what is behind it, and return the call."""
        self[:] = [*before, call]
        return call


CheckFunction = Callable[[ModuleType | Any, Story], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One step of a lab's check: it passes if nothing is raised."""

    title: str
    holes: tuple[int, ...]  # that have to be filled first
    run: CheckFunction


class CheckList(list[Check]):
    """The checks of a lab, in order."""

    def add(self, title: str, *holes: int) -> Callable[[CheckFunction], CheckFunction]:
        """Add a check that needs some holes filled."""

        def decorate(run: CheckFunction) -> CheckFunction:
            self.append(Check(title, holes, run))
            return run

        return decorate


def expect_type(value: Any, kind: type | tuple[type, ...], call: str, name: str = "") -> Any:
    """Return what a call returns; raise a mistake unless it is of a type."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = name or " or ".join(one.__name__ for one in kinds)
    raise Mistake(
        "wrong-type",
        f"{call} returns {type(value).__name__}, and has to return {expected}.",
        [f"{call}  ->  {value!r:.60}"],
    )


def expect_list(value: Any, kind: type, call: str) -> Any:
    """Return what a call returns; raise a mistake unless it is a list of a type."""
    for one in expect_type(value, list, call, f"a list of {kind.__name__}"):
        expect_type(one, kind, f"an element of {call}")
    return value


def expect_match(
    index: Any,
    text: str,
    blocks: Mapping[str, int],
    story: Sequence[str],
    drawn: Iterable[str] = (),
) -> None:
    """Raise a mistake unless an index finds what a dictionary of all cached prefixes finds."""
    ends = (text[:end] for end in range(BLOCK, len(text) + 1, BLOCK))
    right = [blocks[end] for end in takewhile(blocks.__contains__, ends)]
    call = f"match({spaced(text)})"
    match = expect_list(index.match(tokens(text)), int, call)
    if match == right:
        return
    picture = [*story, *drawn, f"{call}  ->  {match}, not {right}"]
    if match == right[::-1]:
        raise Mistake("blocks-out-of-order", "Blocks are not in the order of tokens.", picture)
    if len(match) > len(right):
        why = "A wrong hit gives an answer that looks right and is not (law 3)."
        raise Mistake("finds-what-is-not-there", "match finds other tokens.", picture, why)
    raise Mistake("misses-what-is-cached", "match misses a block that is cached.", picture)


def tokens(text: str) -> list[int]:
    """Return letters as token ids; blanks are for the eye alone."""
    return [ord(letter) for letter in text if letter != " "]


def letters(ids: Iterable[int]) -> str:
    """Return token ids as the letters that they stand for."""
    return "".join(map(chr, ids))


def spaced(text: str, size: int = BLOCK) -> str:
    """Return a text with a blank after each block."""
    return " ".join(text[at : at + size] for at in range(0, len(text), size))


def texts(longest: int, alphabet: str = "AB", shortest: int = 1) -> Iterator[str]:
    """Walk all texts over an alphabet, short ones first."""
    for length in range(shortest, longest + 1):
        yield from map("".join, product(alphabet, repeat=length))

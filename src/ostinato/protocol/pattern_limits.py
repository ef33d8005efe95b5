r"""Bounds the work of a pattern, so that no text makes it slow.

A backtracking matcher tries, at each place of a text, the ways in which a pattern may match. So a
pattern may have no more than ``MAX_WAYS`` of them, counted as it is written::

    \d{4}-\d\d          1 way
    [a-z]{1,64}         64 ways
    (?:Mon|Tues)day     2 ways
    \d{1,9}+            1 way: a possessive quantifier never gives back
    \d+ .* (a|b){2}     refused: no bound, or several ways again and again

Cost: at most ``MAX_WAYS`` times the pattern's length for each character of a text.
"""

import regex

from ostinato.core.errors import ConfigError

MAX_PATTERN_CHARS = 512
MAX_WAYS = 4096
MAX_REPEATS = 512

_PIECE = regex.compile(
    r"(?P<escape>\\[pP]\{[^}]{1,64}\}|\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+\])"
    r"|(?P<open>\((?:\?(?::|P?<(?![=!])\w+>|P?'\w+'))?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<many>[*+]|\{\d*,?\d*\}|\?)(?P<mode>[?+]?)|(?P<other>.)",
    regex.DOTALL,
)
_COUNTS = regex.compile(r"\{(\d{1,6})(,?)(\d{0,6})\}")


def check_pattern(pattern: str) -> None:
    """Refuse a pattern that is no expression, or has too many ways to match.

    Raises:
        ConfigError: The message names the limit, and how to write the pattern instead.
    """
    if not pattern or len(pattern) > MAX_PATTERN_CHARS:
        raise _refusal(pattern, f"must have 1 to {MAX_PATTERN_CHARS} characters")
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise _refusal(pattern, f"is no expression: {error}") from error
    ways = _Ways(pattern).count()
    if ways > MAX_WAYS:
        raise _refusal(
            pattern,
            f"may match in {ways} ways at one place, and at most {MAX_WAYS} are tried: use smaller "
            "repeats, or possessive ones such as [a-z]{1,64}+",
        )


class _Ways:
    """Counts the ways of one pattern: products of sequences, sums of alternatives."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._open: list[list[int]] = [[1]]  # for each open group, the ways of its alternatives
        self._last = 1  # ways of the last piece, which a quantifier follows
        self._is_group = False

    def count(self) -> int:
        for piece in _PIECE.finditer(self._pattern):
            self._take(piece)
        return sum(self._open[0])

    def _take(self, piece: "regex.Match[str]") -> None:
        kind = piece.lastgroup if piece["many"] is None else "many"
        if kind == "many":
            self._repeat(piece["many"], piece["mode"])
            return
        self._is_group = kind == "close"
        if kind == "open":
            self._begin(piece)
        elif kind == "close":
            self._last = sum(self._open.pop())
            self._open[-1][-1] *= self._last
        elif kind == "or":
            self._open[-1].append(1)
        else:
            if piece[0] == "{":
                raise self._refusal("has a { that repeats nothing: write \\{")
            if kind == "escape" and piece[0][1] in "123456789gKLXR":
                raise self._refusal(f"{piece[0]} has no bound: write what it may be")
            self._last = 1

    def _begin(self, piece: "regex.Match[str]") -> None:
        after = self._pattern[piece.end() : piece.end() + 1]
        if piece[0] == "(" and after == "?":
            raise self._refusal("has a group (?...) other than (?:...)")
        self._open.append([1])

    def _repeat(self, many: str, mode: str) -> None:
        low, high = self._bounds(many)
        if self._is_group and (low, high) != (0, 1) and self._last > 1:
            raise self._refusal(f"repeats a group of {self._last} ways: write it out")
        if mode != "+":
            self._open[-1][-1] *= high - low + 1
        self._is_group = False

    def _bounds(self, many: str) -> tuple[int, int]:
        """Return how often a quantifier repeats."""
        if many == "?":
            return 0, 1
        counts = _COUNTS.fullmatch(many)
        if counts is None or (counts[2] and not counts[3]):
            raise self._refusal(f"{many} has no bound: write {{0,64}} or {{1,64}}")
        low = int(counts[1])
        high = int(counts[3]) if counts[2] else low
        if high > MAX_REPEATS:
            raise self._refusal(f"{many}: at most {MAX_REPEATS} repeats")
        return low, high

    def _refusal(self, reason: str) -> ConfigError:
        return _refusal(self._pattern, reason)


def _refusal(pattern: str, reason: str) -> ConfigError:
    return ConfigError(f"pattern={pattern!r:.120}: {reason}")

"""Classifies what varies in a template: a time, an id, a counter, a name."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ostinato.lab.log.request_log import LoggedRequest

SlotKind = Literal["timestamp", "date", "id", "counter", "nonce", "user", "wording"]

_PIECES = re.compile(r"[\w.:+%-]+")
"""Pieces that may be a time or an id: ``<at>10:42</at>`` has two, one of them twice."""

_PUNCTUATION = " .,;:!?()[]\"'`<>"
_TIME = re.compile(r"\d{1,2}:\d{2}")
EPOCH = re.compile(r"(?<![0-9a-z])1[5-9]\d{8}(\d{3})?(\.\d+)?(?![0-9a-z])", re.IGNORECASE)
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DATE = re.compile(
    rf"\d{{4}}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{{2,4}}|\b({MONTHS})[a-z]*\.? \d|"
    rf"\d\.? ({MONTHS})|\b(mon|tues|wednes|thurs|fri|satur|sun)day",
    re.IGNORECASE,
)
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_NAMED_ID = re.compile(r"^[a-z]+[-_](?=[0-9a-z]*\d)[0-9a-z]{6,}$", re.IGNORECASE)
_COUNT = re.compile(r"^\D{0,3}(\d+)\D{0,3}$")
_NONCE = re.compile(r"^(?=.*\d)[0-9a-z.+/=_-]{6,}$", re.IGNORECASE)
_LOCALE = re.compile(r"^[a-z]{2}[-_][A-Z]{2}$")
_ABOUT_USERS = re.compile(
    r"\b(user|name|customer|locale|language|account|talking to|speak\w* (with|to))\b[^.]*$",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Slot:
    """A position of a template where requests differ.

    Attributes:
        before: The words before it.
        after: The words after it.
        values: Its values, by index of the request in its group.
        kind: Kind of values.
    """

    before: str
    after: str = ""
    values: dict[int, str] = field(default_factory=dict)
    kind: SlotKind = "wording"

    def narrow(self) -> None:
        """Move words that all its values begin with before it, and drop those they all end with."""
        split = {number: value.split() for number, value in self.values.items()}
        while all(len(words) > 1 for words in split.values()) and split:
            first, last = ({words[end] for words in split.values()} for end in (0, -1))
            if len(first) == 1:
                self.before = f"{self.before} {first.pop()}".strip()
                split = {number: words[1:] for number, words in split.items()}
            elif len(last) == 1:
                split = {number: words[:-1] for number, words in split.items()}
            else:
                break
        self.values = {number: " ".join(words) for number, words in split.items()}


def shortened(text: str, max_letters: int = 40) -> str:
    """Cut a text that is too long after a word, or inside one that is too long itself."""
    if len(text) <= max_letters:
        return text
    cut = text[: max_letters - 1]
    return (cut.rsplit(" ", 1)[0] if " " in cut[max_letters // 2 :] else cut) + "…"


def kind_of_slot(slot: Slot, requests: Sequence[LoggedRequest]) -> SlotKind:
    """Classify a slot."""
    values = _what_varies([value for value in slot.values.values() if value])
    if not values:
        return "wording"
    if _mostly(UUID.search(value) for value in values):
        return "id"
    if _mostly(EPOCH.search(v) or _touches(_TIME, slot, v) for v in values):
        return "timestamp"
    if _mostly(_touches(_DATE, slot, value) for value in values):
        return "date"
    if _mostly(_NAMED_ID.match(value) for value in values):
        return "id"
    if _mostly(_LOCALE.match(value) for value in values):
        return "user"
    if _is_about_users(slot, requests):
        return "user"
    counts = [_COUNT.match(value) for value in values]
    numbers = [int(count[1]) for count in counts if count]
    if len(numbers) == len(values) and numbers == sorted(numbers):
        return "counter"
    if _mostly(_NONCE.match(value) for value in values) or (
        numbers and len(numbers) == len(values)
    ):
        return "nonce"
    return "wording"


def _what_varies(values: Sequence[str]) -> list[str]:
    """Return the pieces of each value that not all values have; all of it if they have none."""
    pieces = [_PIECES.findall(value) for value in values]
    always = set.intersection(*map(set, pieces)) if pieces else set()
    varying = [" ".join(p for p in own_pieces if p not in always) for own_pieces in pieces]
    shown = [v or value for v, value in zip(varying, values, strict=True)]
    stripped = [value.strip(_PUNCTUATION) for value in shown]
    return [value for value in stripped if value]


def _touches(pattern: re.Pattern[str], slot: Slot, value: str) -> bool:
    """Whether a pattern matches a value, or a part of it with the words around it."""
    before = " ".join(slot.before.split()[-2:]) + " "
    start, stop = len(before), len(before) + len(value)
    text = f"{before}{value} {slot.after}"
    return any(m.start() < stop and m.end() > start for m in pattern.finditer(text))


def _mostly(matches: Iterable[object]) -> bool:
    flags = [bool(match) for match in matches]
    return 10 * sum(flags) >= 9 * len(flags)


def _is_about_users(slot: Slot, requests: Sequence[LoggedRequest]) -> bool:
    """Whether each user has one value, or the words before the slot speak of users."""
    by_user: dict[str, set[str]] = {}
    for number, value in slot.values.items():
        user = requests[number].user or requests[number].tenant
        by_user.setdefault(user, set()).add(value)
    several = len(by_user) > 1 and len({v for values in by_user.values() for v in values}) > 1
    if several and all(len(values) == 1 for values in by_user.values()):
        return True
    words = [len(value.split()) for value in slot.values.values()]
    return bool(_ABOUT_USERS.search(slot.before)) and max(words, default=9) <= 4

"""Which requests are made from one template, and what changes in it?

Nobody tells us the templates, so they are found: the words that all requests of a group agree
on stay, and what lies between them is a slot::

    You are a helper . Now it is 10:42:07 . The user is ann .
    You are a helper . Now it is 10:43:12 . The user is bob .
    You are a helper . Now it is [ slot 0 ] The user is [ slot 1 ]

White space and the order of keys in JSON are set aside first; they have remedies of their own.
What a slot holds is read off its values: a time, a date, an id, a counter, a nonce, something
about the user, or wording.

Source: log parsing by alignment, as in Drain (He et al., ICWS 2017).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, Literal

from ostinato.lab.request_log import LoggedRequest, text_of

SlotKind = Literal["timestamp", "date", "id", "counter", "nonce", "user", "wording"]

LEAST_SIMILARITY = 0.4
"""Share of equal runs of three words from which on two texts are of one template."""

MOST_WORDS = 3000
"""Words of a text that are aligned; what comes behind them belongs to no slot."""

MOST_PAIRS = 250_000
"""Pairs of words that are aligned word by word; of longer texts, runs of three words are."""

_SLOT = "\0"
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
"""Words between blanks; where none are written, in Chinese, Japanese and Korean, letters."""

_PIECES = re.compile(r"[\w.:+%-]+")
"""What may be a time or an id by itself: ``<at>10:42</at>`` has two pieces, one of them twice."""

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
    """What changes in one place of a template.

    Attributes:
        before: The words before it.
        behind: The words behind it.
        values: What stood there, by the place of the request in its group.
        kind: What that is.
    """

    before: str
    behind: str = ""
    values: dict[int, str] = field(default_factory=dict)
    kind: SlotKind = "wording"


@dataclass(slots=True)
class Group:
    """Requests of one template.

    Attributes:
        words: Of the text that they begin with, a slot where they part.
        requests: In the order of the log.
    """

    words: list[str]
    requests: list[LoggedRequest] = field(default_factory=list)
    _runs: tuple[list[str], set[tuple[str, ...]]] | None = None

    @property
    def runs(self) -> set[tuple[str, ...]]:
        """Runs of three words that all its requests have."""
        if self._runs is None or self._runs[0] is not self.words:
            self._runs = self.words, _runs(self.words)
        return self._runs[1]

    @property
    def title(self) -> str:
        """Its first words."""
        words = " ".join("…" if word == _SLOT else word for word in self.words[:8])
        return words if len(words) <= 48 else words[:47] + "…"

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the head of each of its requests; slots are its groups."""
        parts = ["(.*?)" if word == _SLOT else re.escape(word) for word in self.words]
        rest = r"\s*" if len(self.words) < MOST_WORDS else ".*"
        return re.compile(r"\s*" + r"\s*".join(parts) + rest, re.DOTALL)

    def slots(self) -> list[Slot]:
        """Read the slots' values off the requests, and say what they are."""
        places = [place for place, word in enumerate(self.words) if word == _SLOT]
        slots = [
            Slot(
                " ".join(self.words[max(0, place - 6) : place]).replace(_SLOT, "…"),
                " ".join(self.words[place + 1 : place + 3]).replace(_SLOT, "…"),
            )
            for place in places
        ]
        pattern = self.pattern
        for number, request in enumerate(self.requests):
            found = pattern.fullmatch(canonical(head_of(request.body)))
            if found is not None:
                for slot, value in zip(slots, found.groups(), strict=True):
                    slot.values[number] = value
        for slot in slots:
            slot.kind = _kind(slot, self.requests)
        return slots


def group_requests(
    requests: Sequence[LoggedRequest], progress: Callable[[int], None] = lambda _count: None
) -> list[Group]:
    """Part a log by template; ``progress`` is told of each request."""
    groups: list[Group] = []
    for request in requests:
        words = _WORDS.findall(canonical(head_of(request.body)))[:MOST_WORDS]
        group = _find(groups, words)
        if words != group.words:
            group.words = _generalised(group.words, words)
        group.requests.append(request)
        progress(1)
    return groups


def _find(groups: list[Group], words: list[str]) -> Group:
    """Return the group that a text is most alike; a new one if it is like none."""
    mine, best, most = _runs(words), None, LEAST_SIMILARITY
    for group in groups:
        theirs = group.runs
        alike = len(mine & theirs) / max(1, min(len(mine), len(theirs)))
        if words == group.words or (alike >= most and bool(words) == bool(group.words)):
            best, most = group, max(most, alike)
    if best is None:
        best = Group(words)
        groups.append(best)
    return best


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return a text's runs of three words; those of a template run between its slots."""
    runs = zip(words, words[1:], words[2:], strict=False)
    return {run for run in runs if _SLOT not in run} or {tuple(words)}


def _generalised(mine: list[str], theirs: list[str]) -> list[str]:
    """Keep the words of a template that a text agrees with; the rest are slots."""
    words: list[str] = []
    done = (0, 0)
    for start, other, size in _alike(mine, theirs):
        if (start, other) != done:
            words.append(_SLOT)
        words += mine[start : start + size]
        done = start + size, other + size
    return [w for i, w in enumerate(words) if w != _SLOT or i == 0 or words[i - 1] != _SLOT]


def _alike(mine: Sequence[str], theirs: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Align two texts: places in both and the number of equal words; the last is of size 0."""
    run = 1 if len(mine) * len(theirs) <= MOST_PAIRS else 3
    ours, others = (_words_in_runs(side, run) for side in (mine, theirs))
    end = (0, 0)
    for block in SequenceMatcher(None, ours, others, autojunk=False).get_matching_blocks():
        if not block.size:
            yield len(mine), len(theirs), 0
            return
        overlap = max(0, end[0] - block.a, end[1] - block.b)
        size = block.size + run - 1 - overlap
        if size > 0:
            yield block.a + overlap, block.b + overlap, size
            end = block.a + overlap + size, block.b + overlap + size


def _words_in_runs(words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def head_of(body: Mapping[str, Any]) -> str:
    """Return the text that a request begins with: its system messages, or its prompt."""
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    leading = []
    for message in body["messages"]:
        if message["role"] not in ("system", "developer"):
            break
        leading.append(text_of(message))
    return "\n".join(leading)


def canonical(text: str) -> str:
    """Return a text with single spaces and sorted keys."""
    return " ".join(sort_json(text).split())


def sort_json(text: str) -> str:
    """Write every JSON object in a text with its keys sorted; other text stays."""
    decoder, parts, done = json.JSONDecoder(), [], 0
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            start = text.find("{", start + 1)
            continue
        if isinstance(value, dict) and len(value) > 1:
            written = json.dumps(value, sort_keys=True, ensure_ascii=False)
            parts += [text[done:start], written]
            done = end
        start = text.find("{", end)
    return "".join([*parts, text[done:]])


def _kind(slot: Slot, requests: Sequence[LoggedRequest]) -> SlotKind:
    """Say what a slot holds."""
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
    varying = [" ".join(p for p in mine if p not in always) for mine in pieces]
    shown = [v or value for v, value in zip(varying, values, strict=True)]
    stripped = [value.strip(_PUNCTUATION) for value in shown]
    return [value for value in stripped if value]


def _touches(pattern: re.Pattern[str], slot: Slot, value: str) -> bool:
    """Whether a pattern matches a value, or a part of it with the words around it."""
    before = " ".join(slot.before.split()[-2:]) + " "
    start, stop = len(before), len(before) + len(value)
    text = f"{before}{value} {slot.behind}"
    return any(m.start() < stop and m.end() > start for m in pattern.finditer(text))


def _mostly(matches: Iterable[object]) -> bool:
    found = [bool(match) for match in matches]
    return 10 * sum(found) >= 9 * len(found)


def _is_about_users(slot: Slot, requests: Sequence[LoggedRequest]) -> bool:
    """Whether each user has one value, or the words before the slot speak of users."""
    by_user: dict[str, set[str]] = {}
    for number, value in slot.values.items():
        user = str(requests[number].body.get("user") or requests[number].tenant)
        by_user.setdefault(user, set()).add(value)
    several = len(by_user) > 1 and len({v for values in by_user.values() for v in values}) > 1
    if several and all(len(values) == 1 for values in by_user.values()):
        return True
    words = [len(value.split()) for value in slot.values.values()]
    return bool(_ABOUT_USERS.search(slot.before)) and max(words, default=9) <= 4


@dataclass(frozen=True)
class TemplateText:
    """A text of a template, cut at its slots.

    Attributes:
        text: The text.
        pattern: Of its template.
    """

    text: str
    pattern: re.Pattern[str]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where its slots are; empty if it is not of the template."""
        found = self.pattern.fullmatch(self.text)
        return [] if found is None else [found.span(i + 1) for i in range(self.pattern.groups)]

    def without(self, slots: Sequence[int]) -> tuple[str, list[str]]:
        """Return the text without some slots' values, and the values."""
        text, values = self.text, []
        for number in sorted(slots, reverse=True):
            if number < len(self.spans):
                start, stop = self.spans[number]
                values.append(text[start:stop].strip())
                text = text[:start] + text[stop:]
        return text, [value for value in reversed(values) if value]

"""Which requests are made from one template, and what changes in it?

Templates are found by alignment: the words that all requests of a group agree on stay, and what
is between them is a slot::

    You are a helper . Now it is 10:42:07 . The user is ann .
    You are a helper . Now it is 10:43:12 . The user is bob .
    You are a helper . Now it is [ slot 0 ] The user is [ slot 1 ]

White space and the order of keys in JSON are normalised first; they have remedies of their own.
A slot's values tell what it holds: a time, a date, an id, a counter, a nonce, something about the
user, or wording.

Source: log parsing by alignment, as in Drain (He et al., ICWS 2017).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from ostinato.lab.request_log import LoggedRequest

SlotKind = Literal["timestamp", "date", "id", "counter", "nonce", "user", "wording"]

LEAST_SIMILARITY = 0.4
"""Share of equal runs of three words at which two texts are of one template."""

MOST_WORDS = 3000
"""Words of a text that are aligned; slots are found among them only."""

MOST_PAIRS = 250_000
"""Pairs of words that are aligned word by word; in longer texts, runs of three words are."""

_SLOT = "\0"
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
"""Words between blanks; letters in Chinese, Japanese and Korean, which are written without."""

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
    """A place of a template where requests differ.

    Attributes:
        before: The words before it.
        after: The words after it.
        values: What stood there, by the place of the request in its group.
        kind: What that is.
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


@dataclass(slots=True)
class Group:
    """Requests of one template.

    Attributes:
        words: Of the text that they begin with, with slots where they differ.
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
        return shortened(words, 48) if words else "(no system prompt)"

    def slots(self) -> list[Slot]:
        """Collect each slot's values from the requests, and say what they are."""
        places = [place for place, word in enumerate(self.words) if word == _SLOT]
        slots = [
            Slot(
                " ".join(self.words[max(0, place - 6) : place]).replace(_SLOT, "…"),
                " ".join(self.words[place + 1 : place + 3]).replace(_SLOT, "…"),
            )
            for place in places
        ]
        for number, request in enumerate(self.requests):
            text = canonical(request.prompt.head)
            for slot, (start, stop) in zip(slots, slot_spans(self.words, text), strict=False):
                slot.values[number] = text[start:stop]
        for slot in slots:
            slot.kind = _kind(slot, self.requests)
            slot.narrow()
        return slots


def slot_spans(template: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return where the slots of a template are in a text, as places of letters.

    Values are whole words. Each run of words between two slots is matched as far left as it
    fits; a text that is not of the template has no spans.
    """
    found = list(_WORDS.finditer(text))
    words = [match.group() for match in found]
    runs: list[list[str]] = [[]]
    for word in template:
        if word == _SLOT:
            runs.append([])
        else:
            runs[-1].append(word)
    spans, at = list[tuple[int, int]](), 0
    for place, run in enumerate(runs):
        is_last = place == len(runs) - 1 and len(template) < MOST_WORDS
        start = _place_of(run, words, at, is_first=not place, is_last=is_last)
        if start is None:
            return []
        if place:
            edges = [found[at].start(), found[start - 1].end()] if start > at else [0, 0]
            spans.append((edges[0], edges[1]))
        at = start + len(run)
    return spans


def _place_of(
    run: list[str], words: list[str], at: int, *, is_first: bool, is_last: bool
) -> int | None:
    """Find a run of words from a place on; the first begins the text, and the last ends it."""
    size = len(run)
    starts = range(at, len(words) - size + 1)
    if is_first:
        starts = starts[:1]
    if is_last:
        starts = starts[-1:]
    return next((start for start in starts if words[start : start + size] == run), None)


def shortened(text: str, most: int = 40) -> str:
    """Cut a text that is too long after a word, or inside one that is too long itself."""
    if len(text) <= most:
        return text
    cut = text[: most - 1]
    return (cut.rsplit(" ", 1)[0] if " " in cut[most // 2 :] else cut) + "…"


def group_requests(
    requests: Sequence[LoggedRequest], progress: Callable[[int], None] = lambda _count: None
) -> list[Group]:
    """Group a log by template; ``progress`` is called after each request."""
    groups: list[Group] = []
    for request in requests:
        words = _WORDS.findall(canonical(request.prompt.head))[:MOST_WORDS]
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
        except RecursionError:
            break
        if _has_order(value):
            written = json.dumps(value, sort_keys=True, ensure_ascii=False)
            parts += [text[done:start], written]
            done = end
        start = text.find("{", end)
    return "".join([*parts, text[done:]])


def _has_order(value: object) -> bool:
    """Whether a JSON value has an object of several keys in it."""
    if isinstance(value, dict):
        return len(value) > 1 or any(map(_has_order, value.values()))
    return isinstance(value, list) and any(map(_has_order, value))


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
    text = f"{before}{value} {slot.after}"
    return any(m.start() < stop and m.end() > start for m in pattern.finditer(text))


def _mostly(matches: Iterable[object]) -> bool:
    found = [bool(match) for match in matches]
    return 10 * sum(found) >= 9 * len(found)


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

"""Groups requests by template, and finds what varies in it.

Templates are found by alignment: the words common to all requests of a group are kept, and the
text between them is a slot::

    You are a helper . Now it is 10:42:07 . The user is ann .
    You are a helper . Now it is 10:43:12 . The user is bob .
    You are a helper . Now it is [ slot 0 ] The user is [ slot 1 ]

White space and the order of keys in JSON are normalised first; they have remedies of their own.
A slot's values tell what it holds: a time, a date, an id, a counter, a nonce, something about the
user, or wording.

Source: log parsing by alignment, as in Drain (He et al., ICWS 2017).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from ostinato.lab.lint.keys import KeyOrders, Order, reorder_json
from ostinato.lab.lint.slots import Slot, kind_of_slot, shortened
from ostinato.lab.log.request_log import LoggedRequest

MIN_SIMILARITY = 0.4
"""Share of equal word trigrams from which two texts have one template."""

MAX_WORDS = 3000
"""Words of a text that are aligned; slots are found among them only."""

MAX_PAIRS = 250_000
"""Pairs of words that are aligned word by word; in longer texts, runs of three words are."""

_SLOT = "\0"
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
"""Words between blanks; letters in Chinese, Japanese and Korean, which are written without."""


@dataclass(slots=True)
class Group:
    """Requests of one template.

    Attributes:
        words: Words of the text that they begin with, with slots where they differ.
        requests: In the order of the log.
        orders: Orders of keys that its texts are aligned in: those that it had first.
    """

    words: list[str]
    requests: list[LoggedRequest] = field(default_factory=list)
    orders: KeyOrders = field(default_factory=KeyOrders)
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
            text = canonical(request.prompt.head, self.orders)
            for slot, (start, stop) in zip(slots, slot_spans(self.words, text), strict=False):
                slot.values[number] = text[start:stop]
        for slot in slots:
            slot.kind = kind_of_slot(slot, self.requests)
            slot.narrow()
        return slots


def slot_spans(template: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return where the slots of a template are in a text, as places of letters.

    Values are whole words. Each run of words between two slots is matched as far left as it
    fits; a text that is not of the template has no spans.
    """
    matches = list(_WORDS.finditer(text))
    words = [match.group() for match in matches]
    runs: list[list[str]] = [[]]
    for word in template:
        if word == _SLOT:
            runs.append([])
        else:
            runs[-1].append(word)
    spans, at = list[tuple[int, int]](), 0
    for place, run in enumerate(runs):
        is_last = place == len(runs) - 1 and len(template) < MAX_WORDS
        start = _place_of(run, words, at, is_first=not place, is_last=is_last)
        if start is None:
            return []
        if place:
            edges = [matches[at].start(), matches[start - 1].end()] if start > at else [0, 0]
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


def group_requests(
    requests: Sequence[LoggedRequest], progress: Callable[[int], None] = lambda _count: None
) -> list[Group]:
    """Group a log by template; ``progress`` is called after each request."""
    groups: list[Group] = []
    for request in requests:
        words = _WORDS.findall(canonical(request.prompt.head))[:MAX_WORDS]
        group = _find(groups, words)
        if words != group.words:
            group.words = _generalised(group.words, words)
        group.requests.append(request)
        progress(1)
    for group in groups:
        _align_as_sent(group)
    return groups


def _align_as_sent(group: Group) -> None:
    """Align the texts of a group again, in the order of keys that it had first.

    Requests are compared with sorted keys, but a slot is cut out of a text as it was sent.
    """
    heads = [request.prompt.head for request in group.requests]
    if all(canonical(head) == canonical(head, group.orders) for head in dict.fromkeys(heads)):
        return
    words: list[str] = []
    for head in dict.fromkeys(heads):
        other = _WORDS.findall(canonical(head, group.orders))[:MAX_WORDS]
        words = _generalised(words, other) if words else other
    group.words = words


def _find(groups: list[Group], words: list[str]) -> Group:
    """Return the most similar group; a new one if none is similar enough."""
    runs, best, max_similarity = _runs(words), None, MIN_SIMILARITY
    for group in groups:
        other_runs = group.runs
        alike = len(runs & other_runs) / max(1, min(len(runs), len(other_runs)))
        if words == group.words or (alike >= max_similarity and bool(words) == bool(group.words)):
            best, max_similarity = group, max(max_similarity, alike)
    if best is None:
        best = Group(words)
        groups.append(best)
    return best


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return a text's runs of three words; those of a template run between its slots."""
    runs = zip(words, words[1:], words[2:], strict=False)
    return {run for run in runs if _SLOT not in run} or {tuple(words)}


def _generalised(template: list[str], text: list[str]) -> list[str]:
    """Keep the words of a template that a text agrees with; the rest are slots."""
    words: list[str] = []
    done = (0, 0)
    for start, other, size in _alike(template, text):
        if (start, other) != done:
            words.append(_SLOT)
        words += template[start : start + size]
        done = start + size, other + size
    return [w for i, w in enumerate(words) if w != _SLOT or i == 0 or words[i - 1] != _SLOT]


def _alike(left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Align two texts: places in both and the number of equal words; the last is of size 0."""
    run = 1 if len(left) * len(right) <= MAX_PAIRS else 3
    ours, others = (_words_in_runs(side, run) for side in (left, right))
    end = (0, 0)
    for block in SequenceMatcher(None, ours, others, autojunk=False).get_matching_blocks():
        if not block.size:
            yield len(left), len(right), 0
            return
        overlap = max(0, end[0] - block.a, end[1] - block.b)
        size = block.size + run - 1 - overlap
        if size > 0:
            yield block.a + overlap, block.b + overlap, size
            end = block.a + overlap + size, block.b + overlap + size


def _words_in_runs(words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def canonical(text: str, order: Order = sorted) -> str:
    """Return a text with single spaces, and the keys of its JSON in order."""
    return " ".join(reorder_json(text, order).split())

"""Texts that are known with their tokens, and which of them a new text begins with.

Apart for each namespace (a tenant's salt, or a public prefix), the texts are kept in order, so the
one that agrees longest with another text is its neighbour there. Texts are compared, never hashed.
A text that continues an earlier one replaces it: one entry per conversation, of about eight bytes
per token. All namespaces share a bound in bytes; what was used least recently is removed.

An answer is kept as tokens with its prompt. It is decoded when a prompt arrives that continues the
same prompt: most answers are never continued.

A text with its tokens has the places where another text may branch off::

    text       <|im_start|>user Hi<|im_end|> <|im_start|>assistant Hello there<|im_end|>
    ends                   ^                ^            ^        ´     ´              ^
    counts                 1                4            6        8     9             10

``ends`` are boundaries: a new text that agrees so far takes the tokens so far. Places between the
tokens of the newest answer (´) serve as well where the new text goes on with such a special token,
as after an answer whose trailing white space a template drops.
"""

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from ostinato.core.identity import tenant_of
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.observe.prompt_diff import num_alike

_OVERHEAD_BYTES = 1024
"""Of the Python objects around the arrays."""


_row: "Callable[[], array[int]]" = partial(array, "I")


@dataclass(frozen=True, slots=True)
class Places:
    """Places in a text, in order, and how many tokens stand before each."""

    ends: "array[int]" = field(default_factory=_row)  # bytes of the text before each place
    counts: "array[int]" = field(default_factory=_row)  # tokens before it
    # Of the special tokens there; empty for an answer.
    widths: "array[int]" = field(default_factory=_row)

    def add(self, end: int, count: int, width: int | None = None) -> None:
        """Append a place."""
        self.ends.append(end)
        self.counts.append(count)
        if width is not None:
            self.widths.append(width)

    def up_to(self, end: int) -> "Places":
        """Return a copy of those at or before ``end``."""
        num = bisect_right(self.ends, end)
        return Places(self.ends[:num], self.counts[:num], self.widths[:num])

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return TOKEN_BYTES * (len(self.ends) + len(self.counts) + len(self.widths))


@dataclass(frozen=True, slots=True)
class TokenizedText(Sequence[int]):
    """A row of token ids, with the text that it encodes."""

    text: bytes  # in UTF-8
    tokens: "array[int]"  # packed, shape (num_tokens,)
    boundaries: Places = field(default_factory=Places)  # where it may be cut after a special token
    answer: Places = field(default_factory=Places)  # cuts within the newest answer, if any
    generated: tuple[tuple[int, int], ...] = ()  # ranges of tokens that a model generated, in order

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "array[int]": ...
    def __getitem__(self, place: Any) -> Any:
        return self.tokens[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that a model generated."""
        return sum(stop - start for start, stop in self.generated)

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        places = self.boundaries.num_bytes + self.answer.num_bytes
        return len(self.text) + TOKEN_BYTES * len(self.tokens) + places + _OVERHEAD_BYTES

    def head(self, max_tokens: int) -> "TokenizedText":
        """Return it up to the last boundary that is no more than ``max_tokens`` tokens in."""
        num = bisect_right(self.boundaries.counts, max_tokens)
        end = self.boundaries.ends[num - 1] if num else 0
        count = self.boundaries.counts[num - 1] if num else 0
        places, generated = self.boundaries.up_to(end), self.generated_before(count)
        return TokenizedText(self.text[:end], self.tokens[:count], places, generated=generated)

    def generated_before(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of generated tokens among the first ``count``."""
        return tuple((a, min(b, count)) for a, b in self.generated if a < count)


MAX_ANSWERS = 32
"""Answers of one prompt that are kept before they are decoded: the newest."""

AddAnswer = Callable[[TokenizedText, "array[int]"], TokenizedText]
"""From a prompt and the tokens generated behind it to both."""


@dataclass(eq=False, slots=True)
class _Entry:
    """One text, and the answers to it that are not decoded yet."""

    namespace: bytes
    known: TokenizedText
    answers: "tuple[array[int], ...]" = ()

    @property
    def num_bytes(self) -> int:
        return self.known.num_bytes + TOKEN_BYTES * sum(map(len, self.answers))


class KnownTexts:
    """A bounded map from texts to their tokens; safe in any thread."""

    def __init__(self, max_bytes: int, add_answer: AddAnswer) -> None:
        """Start empty; ``add_answer`` decodes answers, and ``max_bytes=0`` keeps nothing."""
        self.max_bytes, self.num_bytes = max_bytes, 0  # of all namespaces together
        self._add_answer = add_answer
        # Sorted by text; tuples are replaced and never changed, so that readers need no lock.
        self._entries: dict[bytes, tuple[_Entry, ...]] = {}
        self._recent: dict[_Entry, int] = {}  # with its bytes, used least recently first
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._recent)

    def note(self, namespace: bytes, known: TokenizedText) -> None:
        """Keep a text, in the place of those that it continues."""
        with self._guard:
            entries = self._entries.get(namespace, ())
            longer = _at(entries, _place(entries, known.text))
            if longer is not None and _begins_with(longer.known, known):
                self._touch(longer)
            else:
                self._insert(_Entry(namespace, known))

    def note_answer(self, namespace: bytes, known: TokenizedText, answer: "array[int]") -> None:
        """Keep what a model generated after a text. Cost: O(1) besides finding the text."""
        with self._guard:
            entries = self._entries.get(namespace, ())
            entry = _at(entries, _place(entries, known.text))
            if entry is None or entry.known.tokens != known.tokens:
                entry = _Entry(namespace, known)
                self._insert(entry)
            if entry in self._recent:
                entry.answers = (*entry.answers[1 - MAX_ANSWERS :], answer)
                self._count(entry)

    def nearest(self, namespace: bytes, text: bytes) -> Iterator[tuple[TokenizedText, int]]:
        """Yield the texts that agree longest with another one: at most two, and how far.

        Cost: O(log(texts)) comparisons at the speed of ``memcmp``.
        """
        for prompt in list(self._begun(namespace, text)):
            if prompt.answers:
                self._decode_answers(prompt)
        entries = self._entries.get(namespace, ())
        place = _place(entries, text)
        for entry in entries[max(0, place - 1) : place + 1]:
            with self._guard:
                self._touch(entry)
            yield entry.known, num_alike(entry.known.text, text)

    def erase(self, tenant: bytes) -> int:
        """Remove the texts of a tenant, those of narrower salts too; returns how many."""
        with self._guard:
            erased = [name for name in self._entries if tenant in (name, tenant_of(name))]
            removed = [entry for name in erased for entry in self._entries.pop(name)]
            self.num_bytes -= sum(map(self._recent.pop, removed))
            return len(removed)

    def clear(self) -> int:
        """Remove everything; returns how many texts that was."""
        with self._guard:
            num_removed = len(self._recent)
            self._entries, self._recent, self.num_bytes = {}, {}, 0
            return num_removed

    def num_bytes_by_tenant(self) -> dict[bytes, int]:
        """Return what each tenant's texts take."""
        totals: dict[bytes, int] = {}
        with self._guard:
            for entry, num_bytes in self._recent.items():
                tenant = tenant_of(entry.namespace)
                totals[tenant] = totals.get(tenant, 0) + num_bytes
        return totals

    def check(self) -> None:
        """Assert that counts, order and bound hold."""
        with self._guard:
            held = [entry for entries in self._entries.values() for entry in entries]
            assert set(held) == set(self._recent) and len(held) == len(self._recent)
            assert [self._recent[entry] for entry in held] == [e.num_bytes for e in held]
            assert self.num_bytes == sum(self._recent.values()) <= self.max_bytes
            for name, entries in self._entries.items():
                texts = [entry.known.text for entry in entries]
                assert texts and texts == sorted(set(texts)), "sorted, and each once"
                assert all(entry.namespace == name for entry in entries)

    def _begun(self, namespace: bytes, text: bytes) -> Iterator[_Entry]:
        """Find the known texts that another one continues, the longest first."""
        entries, query = self._entries.get(namespace, ()), text
        place = bisect_right(entries, query, key=_text_of)
        while place:
            entry = entries[place - 1]
            length = num_alike(entry.known.text, query)
            if length == len(entry.known.text):
                yield entry
                place -= 1
            else:
                query = query[:length]
                place = bisect_right(entries, query, hi=place - 1, key=_text_of)

    def _decode_answers(self, prompt: _Entry) -> None:
        """Replace a prompt by itself with its answers."""
        answers = prompt.answers
        decoded = [self._add_answer(prompt.known, answer) for answer in answers]
        with self._guard:
            if prompt not in self._recent:  # removed meanwhile, or another thread was faster
                return
            prompt.answers = prompt.answers[len(answers) :]
            self._count(prompt)
            for known in decoded:
                self._insert(_Entry(prompt.namespace, known))

    def _insert(self, entry: _Entry) -> None:
        """Insert a text in order, in the place of texts that it continues."""
        if entry.num_bytes > self.max_bytes:
            return
        text = entry.known.text
        entries = self._entries.get(entry.namespace, ())
        stop = _place(entries, text)
        start, same = stop, _at(entries, stop)
        if same is not None and same.known.text == text:
            stop += 1
        while start and text.startswith(entries[start - 1].known.text):
            if entries[start - 1].answers:
                break  # they may still be continued
            start -= 1
        for replaced in entries[start:stop]:
            self.num_bytes -= self._recent.pop(replaced)
        self._entries[entry.namespace] = (*entries[:start], entry, *entries[stop:])
        self._count(entry)

    def _count(self, entry: _Entry) -> None:
        """Count an entry as the newest, and remove the oldest beyond the bound."""
        self.num_bytes -= self._recent.pop(entry, 0)
        self._recent[entry] = entry.num_bytes
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._recent))
            self.num_bytes -= self._recent.pop(oldest)
            entries = self._entries[oldest.namespace]
            place = _place(entries, oldest.known.text)
            self._entries[oldest.namespace] = entries[:place] + entries[place + 1 :]
            if not self._entries[oldest.namespace]:
                del self._entries[oldest.namespace]

    def _touch(self, entry: _Entry) -> None:
        """Note that an entry was used, if it is still there."""
        if entry in self._recent:
            self._recent[entry] = self._recent.pop(entry)


def _place(entries: tuple[_Entry, ...], text: bytes) -> int:
    """Return where a text is, or would be."""
    return bisect_left(entries, text, key=_text_of)


def _text_of(entry: _Entry) -> bytes:
    return entry.known.text


def _at(entries: tuple[_Entry, ...], place: int) -> _Entry | None:
    return entries[place] if place < len(entries) else None


def _begins_with(longer: TokenizedText, known: TokenizedText) -> bool:
    is_begun = longer.text.startswith(known.text)
    return is_begun and longer.tokens[: len(known)] == known.tokens

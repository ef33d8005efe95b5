"""Log-probabilities of prompts that were scored lately: what precedes a hit has no logits.

Harnesses ask for the log-probabilities of a whole prompt (``echo``), once for each of a few
continuations, and read those of the continuation alone. What such prompts have in common is looked
up here, so that the rest hits as any other prompt does::

    "Q: ... A:" " yes"     all rows are computed, and kept
    "Q: ... A:" " no"      rows of "Q: ... A:" are known; the hit ends before " no"

They are those of the same identity: weights, tenant, adapter; and the same bits, since they depend
on what precedes them alone.
"""

import threading
from array import array
from collections import deque
from dataclasses import dataclass

from ostinato.core.identity import Identity
from ostinato.core.plan import TokenLogprob
from ostinato.core.tokens import num_common_tokens

MAX_PROMPTS, MAX_ENTRIES = 64, 2**18
"""Bounds of what is kept: prompts, and log-probabilities of all of them together."""

Rows = list[tuple[TokenLogprob, ...]]
"""Of each token from position 1 on: its own, and those of alternatives."""


@dataclass(frozen=True, slots=True)
class _Scored:
    identity: Identity
    tokens: "array[int]"
    num_alternatives: int
    rows: Rows

    @property
    def num_entries(self) -> int:
        return len(self.rows) * (1 + self.num_alternatives)


class ScoredPrompts:
    """The last scored prompts of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._prompts: deque[_Scored] = deque()  # oldest first
        self._num_entries = 0
        self._lock = threading.Lock()

    def known(self, identity: Identity, tokens: "array[int]", num_alternatives: int) -> Rows:
        """Return what is known of a prompt's first tokens, from position 1 on."""
        packed, best, length = tokens.tobytes(), None, 1
        with self._lock:
            scored = list(self._prompts)
        for each in scored:
            if each.identity == identity and each.num_alternatives >= num_alternatives:
                common = num_common_tokens(packed, each.tokens.tobytes())
                if common > length:
                    best, length = each, common
        return [] if best is None else [r[: 1 + num_alternatives] for r in best.rows[: length - 1]]

    def note(
        self, identity: Identity, tokens: "array[int]", num_alternatives: int, rows: Rows
    ) -> None:
        """Keep what was computed of a whole prompt, in place of the oldest if there is too much."""
        scored = _Scored(identity, tokens, num_alternatives, rows)
        if len(rows) + 1 != len(tokens) or scored.num_entries > MAX_ENTRIES:
            return
        with self._lock:
            self._prompts.append(scored)
            self._num_entries += scored.num_entries
            while len(self._prompts) > MAX_PROMPTS or self._num_entries > MAX_ENTRIES:
                self._num_entries -= self._prompts.popleft().num_entries

    def erase(self, tenant: bytes | None = None) -> None:
        """Remove those of a tenant, or all."""
        with self._lock:
            held = self._prompts
            kept = [p for p in held if tenant is not None and not p.identity.belongs_to(tenant)]
            self._prompts = deque(kept)
            self._num_entries = sum(each.num_entries for each in self._prompts)

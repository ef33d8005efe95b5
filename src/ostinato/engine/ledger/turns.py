"""The turns that the model wrote, by namespace and place, bounded in bytes.

A namespace is a tenant's salt and the model that answers (an adapter, or the base model). Beyond
the bound, the tenant with the most bytes loses the turn that it used least recently: what a tenant
has does not depend on others, as long as it is not the largest.
"""

import secrets
import threading
import weakref
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from ostinato.core.identity import tenant_of
from ostinato.core.tokens import TOKEN_BYTES

MAX_TURNS_PER_PLACE = 32
"""Answers to one prompt that are kept: the newest."""

_OVERHEAD_BYTES = 768
"""Of the Python objects of a turn."""


class TurnScope(NamedTuple):
    """With whom turns are shared: one salt, and one model.

    Attributes:
        salt: The tenant's salt, with what its client added.
        model: Name of the adapter; empty for the base model.
    """

    salt: bytes
    model: str = ""

    @property
    def data(self) -> bytes:
        """The namespace as bytes, for keys."""
        return len(self.salt).to_bytes(8, "little") + self.salt + self.model.encode()

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether it is a tenant's, or that of a narrower salt."""
        return tenant in (self.salt, tenant_of(self.salt))


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """One turn as the model wrote it.

    Attributes:
        number: 16 random bytes that name it.
        meaning: Digest of its content and calls.
        reasoning: Digest of its reasoning; empty if there was none.
        call_ids: Ids of its calls, as the client got them.
        tokens: What was generated, without the token that ended it.
        context: The last tokens before it, to decode it after.
        opening: What the template wrote between the assistant's header and the first token.
        spoken: The text behind the reasoning; None if it is all of the turn, or unknown.
        num_reasoning_tokens: Tokens of the reasoning, marks included.
    """

    number: bytes
    meaning: bytes
    reasoning: bytes
    call_ids: tuple[str, ...]
    tokens: "array[int]"
    context: "array[int]"
    opening: str
    spoken: str | None = None
    num_reasoning_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""
        num_letters = len(self.opening) + len(self.spoken or "") + sum(map(len, self.call_ids))
        return _OVERHEAD_BYTES + TOKEN_BYTES * len(self.tokens) + 4 * num_letters


@dataclass(slots=True, weakref_slot=True, eq=False)
class OpenTurn:
    """A turn that is being generated: where it will be noted.

    Attributes:
        namespace: Whose it is.
        place: Its place in the conversation.
        opening: As of ``WrittenTurn``.
        context: As of ``WrittenTurn``.
        numbers: The number of each continuation, drawn when it is first asked for.
        is_void: Whether its tenant was erased meanwhile, so that it must not be noted.
    """

    namespace: TurnScope
    place: bytes
    opening: str
    context: "array[int]"
    numbers: dict[int, bytes] = field(default_factory=dict)
    is_void: bool = False

    def number(self, index: int = 0) -> bytes:
        """Return the number that a continuation will have."""
        return self.numbers.setdefault(index, secrets.token_bytes(16))


@dataclass(slots=True)
class LedgerCounts:
    """What the ledger did since the start, and what it holds.

    Attributes:
        num_turns: Turns that it holds.
        num_bytes: Their memory.
        noted: Turns that were noted.
        evicted: Turns that were dropped for the bound.
        restored: Turns of prompts that were put back as written, where the template differs.
        restored_tokens: Their tokens.
        restored_reasoning: Those of them with reasoning that the client had dropped.
        unequal: Messages at a known place that meant something else.
        dropped: Turns of prompts of which the template dropped the reasoning.
        dropped_tokens: The tokens of that reasoning.
        opened_seals: Sealed names that named a turn.
        ignored_seals: Sealed names without effect: foreign, forged, or of a turn that is gone.
    """

    num_turns: int = 0
    num_bytes: int = 0
    noted: int = 0
    evicted: int = 0
    restored: int = 0
    restored_tokens: int = 0
    restored_reasoning: int = 0
    unequal: int = 0
    dropped: int = 0
    dropped_tokens: int = 0
    opened_seals: int = 0
    ignored_seals: int = 0


_Key = tuple[TurnScope, bytes, bytes]
"""Namespace, place and number of a turn."""


@dataclass(slots=True)
class _Tenant:
    """One tenant's turns, used least recently first."""

    turns: "OrderedDict[_Key, WrittenTurn]" = field(default_factory=OrderedDict)
    by_place: dict[tuple[TurnScope, bytes], list[bytes]] = field(default_factory=dict)
    num_bytes: int = 0


class TurnLedger:
    """A bounded map from places to the turns that were written there; safe in any thread."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty; ``max_bytes=0`` keeps nothing."""
        self.max_bytes = max_bytes
        self.is_on = max_bytes > 0  # whether it keeps anything
        self.counts = LedgerCounts()
        self._tenants: dict[bytes, _Tenant] = {}
        self._open: weakref.WeakSet[OpenTurn] = weakref.WeakSet()
        self._guard = threading.Lock()

    def begin(self, turn: OpenTurn) -> OpenTurn:
        """Register a turn that is being generated, so that erasing its tenant reaches it."""
        with self._guard:
            self._open.add(turn)
        return turn

    def note(self, begun: OpenTurn, turn: WrittenTurn) -> bool:
        """Keep what was written at a place; returns False if it may not be kept."""
        size = turn.num_bytes
        if size > self.max_bytes:
            return False
        with self._guard:
            if begun.is_void:
                return False
            self._insert(begun.namespace, begun.place, turn, size)
            self.counts.noted += 1
            while self.counts.num_bytes > self.max_bytes:
                largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
                self._remove(largest, next(iter(self._tenants[largest].turns)))
                self.counts.evicted += 1
            return True

    def at(self, namespace: TurnScope, place: bytes) -> list[WrittenTurn]:
        """Return the turns of a place, the newest first, and note that they were used."""
        with self._guard:
            tenant = self._tenants.get(tenant_of(namespace.salt))
            if tenant is None:
                return []
            keys = [(namespace, place, n) for n in tenant.by_place.get((namespace, place), ())]
            for key in keys:
                tenant.turns.move_to_end(key)
            return [tenant.turns[key] for key in reversed(keys)]

    def erase(self, tenant: bytes) -> int:
        """Remove the turns of a tenant, or of one salt of it; returns how many.

        Effects: turns of it that are being generated will not be noted.
        """
        with self._guard:
            for turn in list(self._open):
                turn.is_void |= turn.namespace.belongs_to(tenant)
            entry = self._tenants.get(tenant_of(tenant))
            keys = [] if entry is None else [k for k in entry.turns if k[0].belongs_to(tenant)]
            for key in keys:
                self._remove(tenant_of(tenant), key)
            return len(keys)

    def clear(self) -> int:
        """Remove everything; returns how many turns that was."""
        with self._guard:
            for turn in list(self._open):
                turn.is_void = True
            num_removed = self.counts.num_turns
            self._tenants, self.counts.num_turns, self.counts.num_bytes = {}, 0, 0
            return num_removed

    def num_bytes_by_tenant(self) -> dict[bytes, int]:
        """Return what each tenant's turns take."""
        with self._guard:
            return {name: tenant.num_bytes for name, tenant in self._tenants.items()}

    def count(self, **amounts: int) -> None:
        """Add to counters, by their names in ``LedgerCounts``."""
        with self._guard:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    def check(self) -> None:
        """Assert that counts, places and the bound agree."""
        with self._guard:
            assert self.counts.num_bytes <= self.max_bytes
            assert self.counts.num_turns == sum(len(t.turns) for t in self._tenants.values())
            assert self.counts.num_bytes == sum(t.num_bytes for t in self._tenants.values())
            for name, tenant in self._tenants.items():
                listed = {(*at, n) for at, ns in tenant.by_place.items() for n in ns}
                assert listed == set(tenant.turns) and tenant.turns, "each turn once, by place"
                assert tenant.num_bytes == sum(t.num_bytes for t in tenant.turns.values())
                assert all(tenant_of(key[0].salt) == name for key in tenant.turns)

    def _insert(self, namespace: TurnScope, place: bytes, turn: WrittenTurn, size: int) -> None:
        name = tenant_of(namespace.salt)
        tenant = self._tenants.setdefault(name, _Tenant())
        numbers = tenant.by_place.setdefault((namespace, place), [])
        if turn.number in numbers:
            self._remove(name, (namespace, place, turn.number), drop_empty=False)
        elif len(numbers) >= MAX_TURNS_PER_PLACE:
            self._remove(name, (namespace, place, numbers[0]), drop_empty=False)
            self.counts.evicted += 1
        numbers = tenant.by_place.setdefault((namespace, place), [])
        numbers.append(turn.number)
        tenant.turns[namespace, place, turn.number] = turn
        tenant.num_bytes += size
        self.counts.num_turns += 1
        self.counts.num_bytes += size

    def _remove(self, name: bytes, key: _Key, drop_empty: bool = True) -> None:
        tenant = self._tenants[name]
        turn = tenant.turns.pop(key)
        numbers = tenant.by_place[key[:2]]
        numbers.remove(key[2])
        if not numbers:
            del tenant.by_place[key[:2]]
        tenant.num_bytes -= turn.num_bytes
        self.counts.num_turns -= 1
        self.counts.num_bytes -= turn.num_bytes
        if drop_empty and not tenant.turns:
            del self._tenants[name]

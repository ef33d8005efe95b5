"""An embedder that calls a cache in any order, with any arguments.

What it asks for is served, or refused with an ``OstinatoError`` or for lack of room; a refusal
has changed nothing. After every call the cache checks itself. A store of text follows what steps
write and copy, and between steps all that is findable has been computed by a step that was
committed (law 5).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from ostinato.assembly import PrefixCache, build_cache
from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.errors import OstinatoError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.settings import (
    FreeOrder,
    IndexName,
    PolicyName,
    PrefixCacheConfig,
    StateConfig,
    TenantShare,
    WindowConfig,
)
from ostinato.tenants.terms import PINNED, LeaseId, LeaseTerms
from tests.properties.draw import Choices, Draw, Event, draw_event, weighted
from tests.support.cache_views import letters, windows_of
from tests.support.fake_kv import NEVER_WRITTEN, TORN, Chunk, FakeKV, spell
from tests.support.whole_state import whole_state

BAD = {NEVER_WRITTEN, TORN}
Given = tuple[BlockTable, tuple[CopyRun, ...]]
Place = tuple[str, int]
"""A number of tokens: how many more than those of a table that this names."""

PUBLIC, TENANTS = b"public", (b"", b"a", b"b")
MOST_KEPT = 8
"""Keys, matches and tables that are kept to be passed again, the last ones of each."""


def draw_careless_settings(draw: Draw) -> PrefixCacheConfig:
    """Draw a small cache: plain, with a window, with states, or with both."""
    size, num_blocks = draw((1, 2, 4)), draw((2, 4, 6, 8, 12))
    narrow, wide = WindowConfig(size + 1, 4), WindowConfig(2 * size, 8)
    quota = draw((None, None, 1, 2))
    shares = {} if quota is None else {b"a": TenantShare(draw((0, 1)), quota)}
    return PrefixCacheConfig(
        num_blocks,
        size,
        index=draw(get_args(IndexName)),
        free_order=draw(get_args(FreeOrder)),
        seal_tails=draw((True, True, False)),
        policy=draw(("lru", *get_args(PolicyName))),
        windows=draw(((), (), (narrow,), (wide,), (wide, narrow))),
        states=draw((None, None, StateConfig(3, size), StateConfig(6, 2 * size))),
        tenant_shares=shares,
        reserved_blocks=num_blocks - draw((1, 2, num_blocks)),
        keep_event_batches=4,
        keep_explanations=3,
    )


def draw_text(draw: Draw) -> str:
    """Draw what a sequence adds to a known one."""
    return "".join(draw("AB") for _ in range(draw((0, 1, 2, 3, 4, 5, 9))))


CHOICE = (*[0] * 16, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7)
"""Which of the latest: keys, matches, tables or leases."""

PLACE = (*[("tokens", 0)] * 16, *[("planned", 0)] * 6, ("planned", 1), ("tokens", 4), ("zero", -1))
PLACE += (("zero", 0), ("zero", 1), ("computed", -1), ("computed", 0), ("slots", 0), ("slots", 1))
PLACE += (("tokens", -1), ("tokens", 1), ("planned", -1), ("planned", -4), ("zero", 100))

WHICH: Mapping[str, Callable[[CacheEntry], bool]] = {
    "public": lambda entry: entry.identity.tenant == PUBLIC,
    "a": lambda entry: entry.identity.tenant == b"a",
    "even": lambda entry: entry.idle_tick % 2 == 0,
    "used again": lambda entry: entry.uses > 1,
}
"""What is removed: not all of it with all that continues it."""

TABLE: Mapping[str, Choices] = {"choice": CHOICE, "place": PLACE}
ARGUMENTS: Mapping[str, Mapping[str, Choices]] = {
    "new_key": {
        "choice": CHOICE,
        "cut": (*[99] * 3, *range(9)),
        "suffix": draw_text,
        "tenant": (*[b""] * 4, b"a", b"a", b"b", PUBLIC),
        "start": (0, 0, 0, 2, 4),
    },
    "append": {"choice": CHOICE, "letter": "AB"},
    "match": {"choice": CHOICE, "num_tokens": (*[None] * 9, -1, 0, 1, 4, 100)},
    "admit": {
        "choice": CHOICE,
        "match": (*[None] * 12, 0, 0, 1, 2),
        "writes": (*[True] * 9, False),
        "most_new": (*[None] * 5, 1, 3, 0, -1),
    },
    "grow": TABLE,
    "growable": TABLE,
    "publish": TABLE,
    "release": TABLE,
    "fork": TABLE,
    "pin": TABLE,
    "unpin": {"choice": CHOICE},
    "remove": {"what": (*WHICH,)},
    "new_epoch": {"weights": (None, b"new", "new")},
    "rekey": {"choice": CHOICE},
    "lease": {"choice": CHOICE, "terms": (PINNED, LeaseTerms(3.0, refresh_on_hit=True))},
    "publish_prefix": {"choice": CHOICE},
    "end_lease": {"choice": CHOICE},
    "erase": {"tenant": (*TENANTS, PUBLIC)},
}
WEIGHTS = {"new_key": 20, "append": 20, "match": 10, "admit": 60, "grow": 20, "publish": 60}
WEIGHTS |= {"commit": 40, "fail": 8, "release": 24, "fork": 16, "growable": 1, "pin": 8, "unpin": 6}
WEIGHTS |= {"begin_step": 6, "lease": 14, "publish_prefix": 8, "end_lease": 6, "remove": 3}
WEIGHTS |= {"new_epoch": 1, "rekey": 2, "erase": 2, "reset": 1}
_NAMES = weighted(WEIGHTS)


def draw_careless_event(draw: Draw) -> Event:
    """Draw the next call."""
    return draw_event(draw, _NAMES, ARGUMENTS)


@dataclass(eq=False)
class Followed:
    """What the store knows of a live table: its slots' texts, and how many are written."""

    table: BlockTable
    num_written: int
    texts: list[str] = field(default_factory=list)
    is_new: bool = True  # its state is loaded or copied in the step to come

    def chunk(self, end: int) -> Chunk:
        """Describe its tokens from those that are written up to ``end``."""
        self.texts = spell(self.table.key, self.texts)
        return Chunk(self.table.table_id, self.table.groups, self.texts, self.num_written, end)


class CarelessEmbedder:
    """A cache, another one, and whatever was made with either of them."""

    def __init__(self, settings: PrefixCacheConfig) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._now_s = 0.0
        self._cache, other = (build_cache(settings, lambda: self._now_s) for _ in range(2))
        self._manager, self._admin = self._cache.manager, self._cache.admin
        self._kv = FakeKV(settings)
        num_states = 0 if settings.states is None else settings.states.num_slots
        self._states = [NEVER_WRITTEN] * num_states
        self._copies: list[CopyRun] = []
        self._followed: dict[BlockTable, Followed] = {}
        self._keys = [PrefixKey(Identity(), map(ord, "AB"))]
        self._leases: list[LeaseId] = []
        self._matches, self._tables = _made_by(other, self._keys[0])

    # --- calls ---

    def new_key(self, choice: int, cut: int, suffix: str, tenant: bytes, start: int) -> None:
        """Continue a known sequence, or its beginning, under an identity."""
        known = self._key(choice)
        text = (letters(known.tokens)[:cut] + suffix)[: self.settings.num_slots + 1]
        identity = Identity(tenant=tenant, epoch=self._manager.epoch)
        if start and tenant != PUBLIC:
            base = replace(identity, tenant=PUBLIC)
            identity = replace(identity, base=base, start=start)
        self._keys.append(PrefixKey(identity, map(ord, text)))

    def append(self, choice: int, letter: str) -> None:
        """Append a token to a known sequence, whatever holds it."""
        key = self._key(choice)
        if len(key) <= self.settings.num_slots:
            key.append(ord(letter))

    def match(self, choice: int, num_tokens: int | None) -> None:
        """Look a key up, and keep the match."""
        found = self._call("match", lambda: self._manager.match(self._key(choice), num_tokens))
        self._matches += [] if found is None else [found]

    def admit(self, choice: int, match: int | None, writes: bool, most_new: int | None) -> None:
        """Admit a key, with the match for it or an older one of any key."""
        key = self._key(choice)
        found = self._manager.match(key) if match is None else _latest(self._matches, match)
        if found is not None:
            given = self._call("admit", lambda: self._manager.admit(key, found, writes, most_new))
            is_old = given is not None and key.identity.epoch < self._manager.epoch
            assert not is_old, "a key of old weights was admitted"
            self._follow(given, 0)

    def grow(self, choice: int, place: Place) -> None:
        """Give a table slots."""
        table, num_tokens = self._table(choice), self._number(choice, place)
        self._call("grow", lambda: self._manager.grow(table, num_tokens) or None)

    def growable(self, choice: int, place: Place) -> None:
        """Ask for how many tokens a table could get slots."""
        table, num_tokens = self._table(choice), self._number(choice, place)
        self._call("growable", lambda: self._manager.growable(table, num_tokens))

    def publish(self, choice: int, place: Place) -> None:
        """Plan tokens of a table."""
        table, num_tokens = self._table(choice), self._number(choice, place)
        self._call("publish", lambda: self._manager.publish(table, num_tokens))

    def release(self, choice: int, place: Place) -> None:
        """Release a table."""
        table, num_tokens = self._table(choice), self._number(choice, place)
        self._call("release", lambda: self._manager.release(table, num_tokens))

    def fork(self, choice: int, place: Place) -> None:
        """Fork a table."""
        table, num_tokens = self._table(choice), self._number(choice, place)
        given = self._call("fork", lambda: self._manager.fork(table, num_tokens))
        self._follow(given, num_tokens)

    def commit(self) -> None:
        """Run the step, and say so."""
        self._run(fails=False)
        self._call("commit", self._manager.commit)

    def fail(self) -> None:
        """Begin the step, and say that it raised."""
        self._run(fails=True)
        self._call("fail", self._manager.fail)

    def begin_step(self) -> None:
        """Let time go on, and say that a step is planned."""
        self._now_s += 1.0
        self._call("begin_step", self._manager.begin_step)

    def pin(self, choice: int, place: Place) -> None:
        """Hold what is cached of a key."""
        key, num_tokens = self._key(choice), self._number(choice, place)
        table = self._call("pin", lambda: self._manager.pin(key, num_tokens))
        self._tables += [] if table is None else [table]

    def unpin(self, choice: int) -> None:
        """Release what a table pins, whatever it is."""
        table = self._table(choice)
        self._call("unpin", lambda: self._manager.unpin(table))

    def remove(self, what: str) -> None:
        """Remove some of what is cached, but not all that continues it."""
        self._call("remove", lambda: self._manager.remove(WHICH[what]))

    def new_epoch(self, weights: Any) -> None:
        """Say that the weights have changed."""
        call = self._manager.new_epoch if weights is None else self._admin.new_epoch
        self._call("new_epoch", lambda: call(weights))

    def rekey(self, choice: int) -> None:
        """Renew a key."""
        self._keys.append(self._manager.rekey(self._key(choice)))

    def lease(self, choice: int, terms: LeaseTerms) -> None:
        """Lease a prefix."""
        receipt = self._call("lease", lambda: self._admin.lease(self._key(choice), terms))
        if receipt is not None and receipt.lease_id is not None:
            self._leases.append(receipt.lease_id)

    def publish_prefix(self, choice: int) -> None:
        """Publish a prefix for all tenants."""
        self._call("publish_prefix", lambda: self._admin.publish(self._key(choice)))

    def end_lease(self, choice: int) -> None:
        """End a lease, or one that has ended."""
        if (lease_id := _latest(self._leases, choice)) is not None:
            self._call("end_lease", lambda: self._admin.end_lease(lease_id))

    def erase(self, tenant: bytes) -> None:
        """Erase a tenant, or the public prefix."""
        self._call("erase", lambda: self._admin.erase(tenant))

    def reset(self) -> None:
        """Empty the cache."""
        self._call("reset", self._admin.reset)

    def finish(self) -> None:
        """End the step, release all and empty the cache: nothing is held (law 9)."""
        self.commit()
        for table in [*self._manager.tables.live.values()]:
            self._manager.release(table, 0)
        for table in [t for t in self._tables if t in self._manager.tables.pinned.values()]:
            self._manager.unpin(table)
        self.reset()
        assert not self._manager.num_live_tables
        assert [pool.num_free for pool in self._manager.pools] == [
            pool.num_blocks for pool in self._manager.pools
        ]

    # --- what is compared ---

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call, see that a refusal changes nothing, and check the cache."""
        before, answer = whole_state(self._manager), None
        try:
            answer = call()
            outcome = "done"
        except OstinatoError as error:
            outcome = type(error).__name__
        if outcome != "done" or (answer is None and name in ("admit", "grow", "fork")):
            assert whole_state(self._manager) == before, f"{name} was refused, and has changed it"
        self.counts[f"{name}: {outcome}"] += 1
        self._check()
        return answer

    def _check(self) -> None:
        """Check the cache, and between steps that all that is findable is computed."""
        self._cache.check()
        tables = self._manager.tables
        self._followed = {t: f for t, f in self._followed.items() if t.live_in is tables}
        targets = [load.target for load in self._manager.state_copies[0]]
        assert len(targets) == len(set(targets)), "two states are loaded into one slot"
        if tables.step or tables.decodes:
            return
        for followed in self._followed.values():
            self._kv.read(followed.chunk(followed.num_written))
            self._check_state(followed)
        for key in self._keys[-MOST_KEPT:]:
            self._check_match(self._manager.match(key, len(key)), spell(key))
        for window, kv in zip(windows_of(self._manager), self._kv.stores[1:], strict=True):
            for copy in window.copies():
                for offset in range(len(letters(copy.content.name[: self._size * 4]))):
                    assert kv[copy.block * self._size + offset] not in BAD, "found, not computed"
        if self._cache.states is not None:
            for run in self._cache.states.runs():
                assert not {self._states[e.blocks[0]] for e in run.entries} & BAD, "not computed"

    def _check_match(self, match: PrefixMatch, texts: list[str]) -> None:
        """Compare what is found in full attention with what it has to be."""
        kv, size = self._kv.stores[0], self._size
        for position in range(match.num_shared_tokens):
            slot = match.blocks[position // size] * size + position % size
            assert kv[slot] == texts[position], f"token {position} is found as {kv[slot]!r}"
        for offset in range(match.num_copied_tokens):
            assert match.tail is not None
            found = kv[match.tail.block * size + offset]
            assert found == texts[match.num_shared_tokens + offset], f"the tail has {found!r}"

    def _check_state(self, followed: Followed) -> None:
        """Compare a sequence's running state with its tokens so far."""
        if followed.table.state_slot >= 0 and not followed.is_new:
            end, state = followed.num_written, self._states[followed.table.state_slot]
            assert state == (followed.texts[end - 1] if end else ""), "another state"

    # --- small print ---

    def _run(self, fails: bool) -> None:
        """Write, copy and advance what a step does, all of it torn if it fails."""
        loads, saves = self._manager.state_copies
        for load in loads:
            self._states[load.target] = "" if load.source < 0 else self._states[load.source]
        running = [f for f in self._followed.values() if f.table.num_planned > f.num_written]
        for table in [followed.table for followed in running]:
            while table.num_planned > len(table.key):  # as in a decode that was planned before
                table.key.append(ord("A"))
        chunks = [followed.chunk(followed.table.num_planned) for followed in running]
        copies, self._copies = self._copies, []
        self._kv.write(chunks, copies, fails)
        for followed, chunk in zip(running, chunks, strict=True):
            self._check_state(followed)
            followed.num_written = chunk.end
            if followed.table.state_slot >= 0:
                self._states[followed.table.state_slot] = (
                    TORN if fails else chunk.texts[chunk.end - 1]
                )
        for save in saves:
            self._states[save.target] = TORN if fails else self._states[save.source]
        for followed in self._followed.values():
            followed.is_new = fails

    def _follow(self, given: Given | None, num_tokens: int) -> None:
        """Follow a new table, of which so many tokens are written besides those that hit."""
        if given is not None:
            table, copies = given
            num_written = max(num_tokens, table.num_cached_tokens)
            self._followed[table] = Followed(table, num_written)
            self._copies += copies
            self._tables.append(table)

    @property
    def _size(self) -> int:
        return self.settings.block_size

    def _key(self, choice: int) -> PrefixKey:
        key = _latest(self._keys, choice)
        assert key is not None
        return key

    def _table(self, choice: int) -> BlockTable:
        """Choose a table: live ones first, then those that are or were anything else."""
        live = [*self._manager.tables.live.values()]
        table = _latest([*self._tables[-MOST_KEPT:], *live[-MOST_KEPT:]], choice)
        assert table is not None
        return table

    def _number(self, choice: int, place: Place) -> int:
        """Return a number of tokens as a table or its key has them."""
        table, (name, more) = self._table(choice), place
        if name == "tokens":
            return len(table.key) + more
        return more if name == "zero" else int(getattr(table, f"num_{name}")) + more


def _latest(made: list[Any], choice: int) -> Any:
    """Choose one, the latest first; None if nothing was made."""
    return made[-1 - choice % len(made)] if made else None


def _made_by(cache: PrefixCache, key: PrefixKey) -> tuple[list[PrefixMatch], list[BlockTable]]:
    """Return a match and tables, live and pinned, of a cache."""
    manager = cache.manager
    given = manager.admit(key, manager.match(key))
    assert given is not None
    table = given[0]
    manager.publish(table, len(key))
    manager.commit()
    return [manager.match(key)], [manager.pin(key, len(key)), table]

"""An embedder that calls a cache in any order, with any arguments.

What it asks for is served, or refused with an ``OstinatoError`` or for lack of room; a refusal
has changed nothing. After every call the cache checks itself. A store of text follows what steps
write and copy: between steps all that is findable was computed by a step that was committed
(law 5).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ostinato.assembly import PrefixCache, build_cache
from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.errors import OstinatoError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.settings import PrefixCacheConfig
from ostinato.tenants.terms import LeaseId
from tests.properties.careless_calls import PUBLIC, WHICH, Place
from tests.support.cache.cache_views import letters
from tests.support.cache.step_store import Given, StepStore
from tests.support.cache.whole_state import whole_state

MAX_KEPT = 8
"""Keys, matches and tables that are kept to be passed again, the last ones of each."""


class CarelessEmbedder:
    """A cache, another one, and whatever was made with either of them."""

    def __init__(self, settings: PrefixCacheConfig) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._now_s = 0.0
        self._cache, other = (build_cache(settings, lambda: self._now_s) for _ in range(2))
        self._manager, self._admin = self._cache.manager, self._cache.admin
        self._store = StepStore(settings, self._manager)
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

    def fork(self, choice: int) -> None:
        """Fork a table."""
        table = self._table(choice)
        given = self._call("fork", lambda: self._manager.fork(table))
        self._follow(given, table.num_planned)

    def commit(self) -> None:
        """Run the step, and say so."""
        self._store.run(fails=False)
        self._call("commit", self._manager.commit)

    def fail(self) -> None:
        """Begin the step, and say that it raised."""
        self._store.run(fails=True)
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

    def lease(self, choice: int, terms: Any) -> None:
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

    def erase(self, tenant: Any) -> None:
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
        self._store.check(self._keys[-MAX_KEPT:])

    # --- small print ---

    def _follow(self, given: Given | None, num_tokens: int) -> None:
        """Follow a new table, of which so many tokens are written besides those that hit."""
        if given is not None:
            self._store.follow(given, max(num_tokens, given[0].num_cached_tokens))
            self._tables.append(given[0])

    def _key(self, choice: int) -> PrefixKey:
        key = _latest(self._keys, choice)
        assert key is not None
        return key

    def _table(self, choice: int) -> BlockTable:
        """Choose a table: live ones first, then those that are or were anything else."""
        live = [*self._manager.tables.live.values()]
        table = _latest([*self._tables[-MAX_KEPT:], *live[-MAX_KEPT:]], choice)
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

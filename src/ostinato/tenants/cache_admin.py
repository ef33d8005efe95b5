"""Cache administration, between steps.

* lease: keep a prefix, pinned or for a time;
* publish: keep a prefix for all requests that may begin with it, until it is erased;
* erase: remove everything of a tenant, or of a public prefix and what continues it;
* new epoch: the weights have changed, so that nothing computed before may hit;
* reset: remove everything.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.errors import CacheInUse
from ostinato.settings import PrefixCacheConfig
from ostinato.tenants.lease_book import Lease, LeaseBook
from ostinato.tenants.lease_limits import LeaseLimits
from ostinato.tenants.terms import (
    PINNED,
    EraseReceipt,
    LeaseId,
    LeaseReceipt,
    LeaseStatus,
    LeaseTerms,
)


class Erasable(Protocol):
    """What remembers something of tenants."""

    def erase(self, tenant: bytes) -> int:
        """Erase what is kept of a tenant; returns the number of kept events."""


class PublicLeases(dict[bytes, LeaseId]):
    """The published prefixes of one cache: by the salt of each, the lease that holds it."""

    def may_continue(self, key: PrefixKey, num_hit: int) -> bool:
        """Whether a sequence that hit ``num_hit`` tokens may publish what it computes.

        It may if its public prefix, if it has one, hit in full and will stay.
        """
        identity = key.identity
        others = {stage.tenant for stage in identity.stages} - {identity.tenant}
        return num_hit >= identity.num_public_tokens and others <= self.keys()


class CacheAdmin:
    """Leases, erasure, epochs and reset of one cache."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        manager: CacheManager,
        leases: LeaseBook,
        public: PublicLeases,
        erasables: Iterable[Erasable] = (),
    ) -> None:
        """Start without a lease.

        Args:
            config: Of the cache.
            manager: Of the cache.
            leases: None so far; it observes the manager from the first one on.
            public: What the manager asks whether sequences may continue a public prefix.
            erasables: What else remembers something of tenants.
        """
        self._manager = manager
        self._leases = leases
        self._limits = LeaseLimits(config, manager, leases)
        self._public = public
        self._erasables = list(erasables)

    @property
    def num_leases(self) -> int:
        """Live leases."""
        return len(self._leases)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks of the full-attention group that leases hold, each counted once."""
        return len(self._limits.leased(0))

    def leases(self) -> list[Lease]:
        """List the live leases, those of public prefixes included; in no order."""
        return list(self._leases)

    def lease(self, key: PrefixKey, terms: LeaseTerms) -> LeaseReceipt:
        """Keep a prefix from being evicted.

        Args:
            key: The prefix; as much of it is held as is cached, in whole blocks.
            terms: For how long.

        Returns:
            What is held, and why not all of it.

        Raises:
            ConfigError: The terms are none, such as a number of seconds.
            StepInProgress: Blocks are published and not computed.
        """
        if not isinstance(terms, LeaseTerms):
            raise ConfigError(f"terms={terms!r}: must be LeaseTerms, such as LeaseTerms(ttl_s=300)")
        self._manager.tables.check_between_steps()
        self.expire()
        match, size = self._manager.match(key, len(key)), self._manager.block_size
        num_blocks, cached = len(key) // size, len(match.blocks)
        if not cached:
            return _rejected(self._limits.nothing_to_hold(key))
        leasable = self._limits.num_leasable(key, match)
        if not leasable:
            return _rejected(self._limits.reason(key))
        table = self._manager.pin(key, leasable * size)
        if not self._leases.num_opened:
            self._manager.observers.attach(self._leases)
        lease = self._leases.open(table, terms)
        reason = ""
        if leasable < cached:
            reason = self._limits.reason(key)
        elif cached < num_blocks:
            reason = f"only {cached} of {num_blocks} blocks are cached"
        status = LeaseStatus.CLIPPED if reason else LeaseStatus.ACCEPTED
        return LeaseReceipt(status, leasable * size, reason, lease.lease_id, lease.expires_s)

    def publish(self, key: PrefixKey) -> LeaseReceipt:
        """Keep a prefix for all sequences whose identity names it as their public prefix.

        It is held until it is erased: other tenants' content continues it, and whether it is
        cached would tell one tenant what another did.

        Args:
            key: The prefix, whole blocks, under a salt of its own; computed by a request before.

        Returns:
            Accepted or rejected; what is not held in full is not kept, unless the salt has more.
        """
        salt = key.identity.tenant
        if not salt:
            return _rejected("salt=b'' is shared: publish under a salt of its own")
        if salt in self._public:
            return _rejected(f"salt={salt!r} is public already: erase it first")
        receipt = self.lease(key, PINNED)
        if receipt.status is LeaseStatus.ACCEPTED and receipt.lease_id is not None:
            self._public[salt] = receipt.lease_id
            return receipt
        if receipt.lease_id is not None:
            self.end_lease(receipt.lease_id)
        self._remove_rejected(key)
        return _rejected(receipt.reason)

    def _remove_rejected(self, key: PrefixKey) -> None:
        """Remove what was computed to be published; nothing if its salt has more."""
        salt, match = key.identity.tenant, self._manager.index.match(key, len(key))
        entries = {e for e in self._manager.pool.entries() if e.identity.belongs_to(salt)}
        if not match.num_unmatched and entries.issubset(match.entries):
            self._manager.remove(lambda entry: entry.identity.belongs_to(salt))
            self._manager.settle()

    def is_public(self, salt: bytes) -> bool:
        """Whether a prefix of that salt is published."""
        return salt in self._public

    def has_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease has not ended."""
        self.expire()
        return lease_id in self._leases

    def end_lease(self, lease_id: LeaseId) -> bool:
        """End a lease; returns False if there is none of that number.

        The lease of a public prefix is ended by ``erase`` only.
        """
        return lease_id not in self._public.values() and self._end(lease_id)

    def expire(self) -> None:
        """End the leases that have expired, in O(log n) each."""
        self._leases.on_step(self._manager.unpin)

    def erase(self, tenant: bytes) -> EraseReceipt:
        """Remove every block, token id, digest and count of a tenant.

        Args:
            tenant: Its salt, which covers all that were derived from it; that of a public prefix
                covers what continues it.

        Raises:
            CacheInUse: It has running sequences, or pinned tables that no lease holds.
            InvalidIdentity: The salt is not of bytes.

        Effects: its leases end; kept events are removed, so that consumers start over. The KV
        store is the caller's to zero: see ``live_slots``.
        """
        Identity(tenant=tenant)  # raises InvalidIdentity; a text would match no tenant
        live = self._manager.tables.live.values()
        running = sum(table.key.identity.belongs_to(tenant) for table in live)
        if running:
            raise CacheInUse(
                f"{running} sequences of the tenant are running: wait until they have ended, or "
                "cancel them"
            )
        self._check_pins(lambda table: table.key.identity.belongs_to(tenant))
        leases = [x for x in self._leases if x.table.key.identity.belongs_to(tenant)]
        for lease in leases:
            self._end(lease.lease_id)
        self._public.pop(tenant, None)
        num_blocks = self._manager.remove(lambda entry: entry.identity.belongs_to(tenant))
        self._manager.settle()
        num_events = sum(erasable.erase(tenant) for erasable in self._erasables)
        return EraseReceipt(num_blocks=num_blocks, num_leases=len(leases), num_events=num_events)

    def live_slots(self) -> list[dict[int, int]]:
        """Return, group by group, which blocks have content and how many tokens of it."""
        size, slots = self._manager.block_size, list[dict[int, int]]()
        for contents in self._manager.contents:
            live = dict[int, int]()
            for entry in (entry for run in contents.runs() for entry in run.entries):
                written = len(entry.run_from(0)[1]) // TOKEN_BYTES
                for place, block in enumerate(entry.blocks):
                    live[block] = min(size, written - place * size)
            slots.append(live)
        for table in [*self._manager.tables.live.values(), *self._manager.tables.pinned.values()]:
            held = [table.blocks, *(held.blocks for held in table.held)]
            for pool, live, blocks in zip(self._manager.pools, slots, held, strict=True):
                for place, block in enumerate(blocks):
                    if block < pool.num_blocks:  # and not a window's null block
                        written = max(0, min(table.num_computed - place * size, size))
                        live.setdefault(block, written)
        return slots

    def new_epoch(self, weights: bytes | None = None) -> int:
        """Note that the weights have changed.

        Args:
            weights: Their fingerprint, for waiting requests; None keeps the old one.

        Returns:
            The new epoch, for the identities of requests from now on.

        Effects: what was computed before is removed, at once or as soon as the running
        sequences that read it have ended; they publish nothing more. Leases end.
        """
        self._manager.new_epoch(weights)
        self._end_all()
        self._manager.settle()
        return self._manager.epoch

    def reset(self) -> None:
        """Remove everything, leases included.

        Raises:
            CacheInUse: Requests hold blocks, or pinned tables do that no lease holds.
        """
        if self._manager.num_live_tables:
            raise CacheInUse(
                f"{self._manager.num_live_tables} running sequences hold blocks: the cache can be "
                "reset when they have finished, or with preempt_running=True"
            )
        self._check_pins(lambda table: True)
        self._end_all()
        self._manager.remove(lambda entry: True)
        self._manager.cleared(everything=True)

    def _check_pins(self, belongs: Callable[[BlockTable], bool]) -> None:
        """Raise CacheInUse if tables that no lease holds are pinned."""
        leased = {lease.table for lease in self._leases}
        pinned = [table for table in self._manager.tables.pinned.values() if table not in leased]
        if num_pinned := sum(map(belongs, pinned)):
            raise CacheInUse(f"{num_pinned} tables are pinned, not for leases: unpin them first")

    def _end(self, lease_id: LeaseId) -> bool:
        lease = self._leases.close(lease_id)
        if lease is not None:
            self._manager.unpin(lease.table)
            self._manager.settle()  # what was above its tenant's quota is evicted
        return lease is not None

    def _end_all(self) -> None:
        self._public.clear()
        for lease in self._leases:
            self._end(lease.lease_id)


def _rejected(reason: str) -> LeaseReceipt:
    return LeaseReceipt(LeaseStatus.REJECTED, reason=reason)

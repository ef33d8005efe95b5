"""What may an administrator ask?

* lease: keep a prefix, pinned or for a time;
* publish: keep a prefix for all who may begin with it, until it is erased;
* erase: leave nothing of a tenant, or of a public head and what stands behind it;
* new epoch: the weights have changed, so that nothing computed before may hit;
* reset: forget everything.

All of it happens between steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ostinato.cache.block_table import BlockTable
from ostinato.cache.ghost import Ghost
from ostinato.cache.group_state import live_slots
from ostinato.cache.groups import Groups
from ostinato.cache.journal import Journal
from ostinato.cache.lease_book import Lease, LeaseBook
from ostinato.cache.lease_limits import LeaseLimits
from ostinato.core.errors import CacheInUse
from ostinato.core.identity import PrefixKey
from ostinato.core.lease import PINNED, LeaseId, LeaseReceipt, LeaseStatus, LeaseTerms
from ostinato.core.tenancy import EraseReceipt


class Custody:
    """Leases, erasure, epochs and reset of one cache.

    Attributes:
        epoch: Raised with each update of the weights; part of every new identity.
    """

    def __init__(
        self,
        groups: Groups,
        journal: Journal,
        clock: Callable[[], float],
        tables: Mapping[int, BlockTable],
        ghost: Ghost | None = None,
    ) -> None:
        """Start without a lease, in epoch 0.

        Args:
            groups: What is cached.
            journal: Is told of what is forgotten.
            clock: Seconds that never fall.
            tables: The live sequences; read, never changed.
            ghost: Starts anew whenever something is forgotten on purpose.
        """
        self.epoch = 0
        self._weights: bytes | None = None
        self._groups = groups
        self._journal = journal
        self._live = tables
        self._ghost = ghost
        self._leases = LeaseBook(clock)
        self._limits = LeaseLimits(groups, self._leases)
        self._public: dict[bytes, LeaseId] = {}  # by the salt of the public head

    @property
    def num_leases(self) -> int:
        """Live leases."""
        return len(self._leases)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks of the full-attention group that leases hold, each counted once."""
        return len(self._limits.leased(0))

    def tables(self) -> list[BlockTable]:
        """List what leases hold."""
        return [lease.table for lease in self._leases]

    def leases(self) -> list[Lease]:
        """List the live leases, those of public heads included; in no order."""
        return list(self._leases)

    def lease(self, key: PrefixKey, terms: LeaseTerms) -> LeaseReceipt:
        """Keep a prefix from being evicted.

        Args:
            key: The prefix; as much of it is held as is cached, in whole blocks.
            terms: For how long.

        Returns:
            What is held, and why not all of it.
        """
        self.expire()
        match = self._groups.match(key, len(key))
        wanted, cached = len(key) // self._groups.block_size, len(match.blocks)
        if not cached:
            return LeaseReceipt(LeaseStatus.REJECTED, reason=self._limits.nothing_to_hold(key))
        bindable = self._limits.num_bindable(key, match)
        if not bindable:
            return LeaseReceipt(LeaseStatus.REJECTED, reason=self._limits.reason(key))
        held = self._hold(key, bindable)
        lease = self._leases.open(held, terms)
        reason = ""
        if bindable < cached:
            reason = self._limits.reason(key)
        elif cached < wanted:
            reason = f"only {cached} of {wanted} blocks are cached"
        status = LeaseStatus.CLIPPED if reason else LeaseStatus.ACCEPTED
        tokens = bindable * self._groups.block_size
        return LeaseReceipt(status, tokens, reason, lease.lease_id, lease.expires_s)

    def publish(self, key: PrefixKey) -> LeaseReceipt:
        """Keep a prefix for all sequences whose identity names it as their head.

        It is held until it is erased, for what hangs behind it belongs to others, and whether it
        is cached would tell one tenant what another did.

        Args:
            key: The prefix, whole blocks, under its own identity; computed by a request before.

        Returns:
            Accepted or rejected; what is not held in full is not kept at all.
        """
        salt = key.identity.tenant
        receipt = self.lease(key, PINNED)
        if receipt.status is LeaseStatus.ACCEPTED and receipt.lease_id is not None:
            self._public[salt] = receipt.lease_id
            return receipt
        if receipt.lease_id is not None:
            self.end_lease(receipt.lease_id)
        self._groups.forget(lambda entry: entry.identity.belongs_to(salt))
        self._clear_ghost()
        self._journal.commit()
        return LeaseReceipt(LeaseStatus.REJECTED, reason=receipt.reason)

    def is_public(self, salt: bytes) -> bool:
        """Whether a head of that salt is published and held."""
        lease_id = self._public.get(salt)
        return lease_id is not None and lease_id in self._leases

    def may_continue(self, key: PrefixKey, num_tokens: int) -> bool:
        """Whether a sequence may publish what it computes: its public head, if any, will stay.

        Args:
            key: The sequence.
            num_tokens: Its first tokens that hit.
        """
        head = key.identity.head
        return head is None or (num_tokens >= head.num_tokens and self.is_public(head.tenant))

    def has_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease still runs."""
        self.expire()
        return lease_id in self._leases

    def end_lease(self, lease_id: LeaseId) -> bool:
        """Let go of a lease; returns False if there is none of that number.

        A public head is not let go of so: erase it.
        """
        return lease_id not in self._public.values() and self._let_go(lease_id)

    def _let_go(self, lease_id: LeaseId) -> bool:
        lease = self._leases.close(lease_id)
        if lease is not None:
            self._groups.drop(lease.table)
            self._journal.commit()  # what was above its tenant's quota is gone
        return lease is not None

    def expire(self) -> None:
        """Let go of the leases whose time is up, in O(log n) each."""
        for lease in self._leases.expired():
            self._groups.drop(lease.table)

    def used(self, key: PrefixKey, num_tokens: int) -> None:
        """Note that a request used a prefix; leases that ask for it start anew.

        Args:
            key: The request's sequence.
            num_tokens: Its first tokens that hit, copied ones included.
        """
        if not self._leases.are_refreshed:
            return
        if num_tokens and num_tokens == len(key) - 1:
            num_tokens += 1  # all that may hit did (law 4)
        self._leases.used(key, num_tokens)

    def erase(self, tenant: bytes) -> EraseReceipt:
        """Leave no block, token id, digest or count of a tenant.

        Args:
            tenant: Its salt, with all that narrow it; that of a public head takes along what
                stands behind it.

        Raises:
            CacheInUse: It has running sequences; let them end, or cancel them.

        Effects: its leases end; kept events are dropped, so that consumers start over. The KV
        store is the caller's to zero: see ``live_slots``.
        """
        running = sum(t.key.identity.belongs_to(tenant) for t in self._live.values())
        if running:
            raise CacheInUse(
                f"{running} sequences of the tenant are running: wait until they have ended, or "
                "cancel them"
            )
        leases = [x for x in self._leases if x.table.key.identity.belongs_to(tenant)]
        for lease in leases:
            self._let_go(lease.lease_id)
        self._public.pop(tenant, None)
        num_blocks = self._groups.forget(lambda entry: entry.identity.belongs_to(tenant))
        self._clear_ghost()
        self._journal.commit()
        num_events = self._journal.forget(tenant)
        return EraseReceipt(num_blocks=num_blocks, num_leases=len(leases), num_events=num_events)

    def live_slots(self) -> list[dict[int, int]]:
        """Say, group by group, which blocks have content and how many tokens of it."""
        return list(live_slots(self._groups, [*self._live.values(), *self.tables()]))

    def new_epoch(self, weights: bytes | None = None) -> int:
        """Note that the weights have changed.

        Args:
            weights: Their fingerprint, for requests that wait; None leaves them theirs.

        Returns:
            The new epoch, for the identities of requests from now on.

        Effects: what was computed before is forgotten, at once or as soon as the running
        sequences that read it have ended; they publish nothing more. Leases end.
        """
        self.epoch += 1
        self._weights = weights
        self._clear_ghost()
        for table in self._live.values():
            table.writes = False
        self._end_all_leases()
        self.forget_stale()
        self._journal.commit()
        return self.epoch

    def renew(self, key: PrefixKey) -> PrefixKey:
        """Return a sequence's key under the weights of now."""
        weights = key.identity.weights if self._weights is None else self._weights
        identity = replace(key.identity, epoch=self.epoch, weights=weights)
        return PrefixKey(identity, key.tokens, key.images)

    def reset(self) -> None:
        """Forget everything, leases included.

        Raises:
            CacheInUse: Requests hold blocks; preempt or finish them first.
        """
        if self._live:
            raise CacheInUse(
                f"{len(self._live)} running sequences hold blocks: the cache can be reset "
                "when they have finished, or with preempt_running=True"
            )
        self._end_all_leases()
        self._groups.forget(lambda entry: True)
        self._clear_ghost()
        self._journal.cleared()

    def _end_all_leases(self) -> None:
        self._public.clear()
        for lease in self._leases:
            self._let_go(lease.lease_id)

    def _clear_ghost(self) -> None:
        if self._ghost is not None:
            self._ghost.clear()

    def forget_stale(self) -> None:
        """Forget what was computed under old weights and is held no more."""
        self._groups.forget(lambda entry: entry.identity.epoch < self.epoch)

    def _hold(self, key: PrefixKey, num_blocks: int) -> BlockTable:
        """Hold a prefix of whole blocks; an image may go on behind it."""
        num_tokens = num_blocks * self._groups.block_size
        table = self._groups.hold(key, self._groups.match(key, num_tokens))
        table.writes, table.num_planned = False, num_tokens
        return table

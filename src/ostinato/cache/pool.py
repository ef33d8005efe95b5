"""Who holds which block?

The pool counts; it never looks at content. Blocks without content wait in the scratch list,
cached entries that nobody holds wait in the eviction policy of their account, and both are
free::

    all blocks = scratch + evictable + held + private
                 └──── free ───────┘

``free_order`` says which of the two gives first: ``scratch_first`` spares every cached block
while a scratch one is left; ``classic`` goes by the time of release alone, as in the worked
example of vLLM's document. ``accounts`` says who may take from whom.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ostinato.cache.accounts import Account, Accounts
from ostinato.cache.block import CacheEntry
from ostinato.cache.histogram import Histogram
from ostinato.cache.past import Past
from ostinato.cache.policies.contract import Turn
from ostinato.cache.scratch import ScratchRuns
from ostinato.core.config import FreeOrder
from ostinato.core.ids import BlockId


class BlockPool:
    """A fixed number of blocks and who may be given one next.

    Attributes:
        num_blocks: All blocks.
        accounts: Whose blocks they are.
        joins: Whether the policy lets an entry grow that was there before.
        past: What the policy remembers, and learns of what comes back.
        num_allocated: Blocks given away so far; the clock of ``reuse_distances``.
        reuse_distances: For each evictable block that was held again, the blocks given away
            meanwhile: a pool smaller by so many would have lost it.
    """

    def __init__(
        self,
        num_blocks: int,
        accounts: Accounts,
        free_order: FreeOrder,
        clock: Callable[[], float],
    ) -> None:
        """Make a pool in which every block is scratch, block 0 first."""
        self.num_blocks = num_blocks
        self.accounts = accounts
        self._only = None if accounts.are_several else accounts.common
        self.joins = accounts.common.policy.joins
        self.past = Past(accounts, clock)
        self.num_allocated = 0
        self.reuse_distances = Histogram()
        self._classic = free_order == "classic"
        self._clock = clock
        self._tick = 0
        self._scratch = ScratchRuns(num_blocks, self._classic)

    @property
    def num_scratch(self) -> int:
        """Blocks that are free and without content."""
        return self._scratch.num_blocks

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return self.accounts.num_evictable

    @property
    def num_free(self) -> int:
        """Blocks that could be given to somebody."""
        return self.num_scratch + self.num_evictable

    def num_free_for(self, account: Account) -> int:
        """Blocks that could be given to an account now: all but what others' floors protect."""
        return self.num_scratch + self.accounts.num_takeable_by(account)

    @property
    def scratch(self) -> list[BlockId]:
        """Scratch blocks in the order in which they would be given away."""
        return [block for _, block in self._scratch]

    def next_victim(self, account: Account, num_wanted: int) -> CacheEntry | None:
        """Name the entry to evict for an account's next blocks; None if scratch comes first."""
        if self._only is not None and self.num_scratch and not self._classic:
            return None
        own = self.accounts.own_victim(account)
        if own is not None:
            return own
        if self.num_scratch and not self._classic:
            return None
        victim = self.accounts.victim(account, num_wanted)
        if not self.num_scratch:
            assert victim is not None, "the caller takes no more than num_free_for tells"
            return victim
        older = victim is not None and victim.idle_tick < self._scratch.first_tick
        return victim if older else None

    def num_takeable(self, victim: CacheEntry, account: Account) -> int:
        """Blocks of a victim that an account may take."""
        owner = self.accounts.of(victim.identity.owner)
        most = owner.policy.takeable(victim)
        return most if owner is account else min(most, owner.num_takeable)

    def take_plainly(self, num_blocks: int) -> "array[int] | None":
        """Take blocks where nothing has to be evicted and nobody asked for an order of his own.

        Returns:
            Block ids, charged to the one account that there is; None if it is not that simple.
        """
        account, scratch = self._only, self._scratch
        if account is None or self._classic or scratch.num_blocks < num_blocks:
            return None
        taken = scratch.take(num_blocks)
        while len(taken) < num_blocks:
            taken.extend(scratch.take(num_blocks - len(taken)))
        account.num_charged += num_blocks
        self.num_allocated += num_blocks
        return taken

    def take_scratch(self, most: int) -> "array[int]":
        """Take up to ``most`` scratch blocks that come before every cached one, at least one.

        Returns:
            Block ids, now private to the caller, who charges them.
        """
        return self._scratch.take(most)

    def charge(self, account: Account, num_blocks: int) -> None:
        """Note that an account was given blocks."""
        account.num_charged += num_blocks
        self.num_allocated += num_blocks

    def give_scratch(self, blocks: "array[int]", account: Account) -> None:
        """Take private blocks back from an account; their content is lost.

        Args:
            blocks: Ids in token order; they are given away tail first.
            account: Whom they were charged to.
        """
        if not blocks:
            return
        self._tick += 1
        self._scratch.give(blocks, self._tick)
        account.num_charged -= len(blocks)

    def now(self) -> float:
        """Return the clock's seconds, to be noted as the birth of many entries."""
        return self._clock()

    def adopt(self, entry: CacheEntry) -> None:
        """Note a new entry, made of blocks that are charged to its tenant already."""
        entry.born_s = self._clock()

    def idle(self, entry: CacheEntry, turn: Turn | None = None) -> None:
        """Note that nobody holds an entry any more: it becomes evictable.

        Args:
            entry: Which; entries of one sequence come tail first.
            turn: What is known of the request that held it; None if it was no request.
        """
        self._tick += 1
        entry.idle_tick = self._tick
        entry.idle_since_s = self._clock()
        entry.idle_allocated = self.num_allocated
        account = self._only or self.accounts.of(entry.identity.owner)
        account.policy.add(entry, turn)
        account.num_evictable += entry.num_blocks

    def idle_all(self, entries: Sequence[CacheEntry], turn: Turn | None = None) -> None:
        """Note that nobody holds entries of one sequence any more, tail first."""
        if self._only is None:  # behind a public head they may be charged to two accounts
            for entry in entries:
                self.idle(entry, turn)
            return
        now_s, moment, num_blocks = self._clock(), self.num_allocated, 0
        tick = self._tick
        for entry in entries:
            tick += 1
            entry.idle_tick, entry.idle_since_s, entry.idle_allocated = tick, now_s, moment
            num_blocks += entry.num_blocks
        self._tick = tick
        self._only.policy.add_all(entries, turn)
        self._only.num_evictable += num_blocks

    def hold(self, entry: CacheEntry) -> None:
        """Note that an evictable entry is held again."""
        account = self._only or self.accounts.of(entry.identity.owner)
        account.policy.remove(entry)
        entry.uses += 1
        num_blocks = entry.num_blocks
        account.num_evictable -= num_blocks
        self.reuse_distances.add(self.num_allocated - entry.idle_allocated, num_blocks)

    def hold_all(self, entries: Sequence[CacheEntry]) -> None:
        """Note that evictable entries of one sequence are held again."""
        if self._only is None:  # behind a public head they may be charged to two accounts
            for entry in entries:
                self.hold(entry)
            return
        self._only.policy.remove_all(entries)
        moment, num_blocks, held = -1, 0, 0
        for entry in entries:
            entry.uses += 1
            if entry.idle_allocated != moment:  # most of a path was let go of at once
                if num_blocks:
                    self.reuse_distances.add_whole(self.num_allocated - moment, num_blocks)
                held += num_blocks
                moment, num_blocks = entry.idle_allocated, 0
            num_blocks += entry.num_blocks
        self.reuse_distances.add_whole(self.num_allocated - moment, num_blocks)
        self._only.num_evictable -= held + num_blocks

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Note that an entry became two; block counts stay."""
        head.idle_tick, head.idle_since_s = tail.idle_tick, tail.idle_since_s
        head.idle_allocated = tail.idle_allocated
        head.uses = tail.uses
        if not tail.ref_count:
            self.accounts.of(tail.identity.owner).policy.split(tail, head)

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry loses its last blocks; if all, it is evictable no more.

        Called while the entry still has them.
        """
        account = self.accounts.of(entry.identity.owner)
        account.num_evictable -= num_blocks
        account.num_charged -= num_blocks
        account.policy.evict(entry, num_blocks)

    def expose(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more, or on this copy of it."""
        if not entry.ref_count:
            self.accounts.of(entry.identity.owner).policy.expose(entry)

    def age_s(self, entry: CacheEntry) -> float:
        """Seconds since an evictable entry was last held."""
        return self._clock() - entry.idle_since_s

    def residency_s(self, entry: CacheEntry) -> float:
        """Seconds since an entry was published."""
        return self._clock() - entry.born_s

    def entries(self) -> Iterator[CacheEntry]:
        """Walk all evictable entries, those released longest ago first."""
        entries = [entry for account in self.accounts for entry in account.policy]
        return iter(sorted(entries, key=lambda entry: entry.idle_tick))

    def free_order(self) -> Iterator[BlockId]:
        """Walk all free blocks in the order in which they would be given away under LRU."""
        scratch = deque(self._scratch)
        for entry in self.entries():
            while scratch and not (self._classic and entry.idle_tick < scratch[0][0]):
                yield scratch.popleft()[1]
            yield from entry.blocks_tail_first
        yield from (block for _, block in scratch)

    def check(self) -> None:
        """Assert that counts and lists agree and no block is free twice."""
        for account in self.accounts:
            account.policy.check()
            evictable = sum(entry.num_blocks for entry in account.policy)
            assert evictable == account.num_evictable, "evictable blocks are miscounted"
            assert evictable <= account.num_charged, "more evictable than charged"
            victim = account.policy.victim()
            assert victim is None or victim.is_leaf, "the victim has cached descendants"
        charged = sum(account.num_charged for account in self.accounts)
        assert charged + self.num_scratch == self.num_blocks, "charged blocks are miscounted"
        free = list(self.free_order())
        assert len(free) == len(set(free)), f"a block is free twice: {free}"
        assert all(0 <= block < self.num_blocks for block in free), f"no such block: {free}"
        assert len(self.scratch) == self.num_scratch, "scratch blocks are miscounted"
        assert len(free) == self.num_free, f"{len(free)} free blocks, {self.num_free} counted"

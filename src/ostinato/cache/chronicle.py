"""What was cached, and why did it go?

The memory behind law 10. The manager tells it who was admitted, what was lost and to whom;
``explain`` reads it when somebody asks. It is bounded in every direction:

* the last ``keep_explanations`` sequences;
* their tokens: at most four times as many as the pool holds (4 bytes each, beside kilobytes of
  KV), and never less than 65,536; those of a prefix that several share count for each of them,
  though the radix index keeps them once for all;
* the last losses: as many as the pool has blocks, and never less than 1,024.

A loss names blocks, not contents, so that noting one costs the same however long the prefix
was. Which content it was follows from the visit whose blocks those were, and from the order of
numbers: the first loss of a block after its visit ended is the loss of that content.

Rules:

1. Nothing here decides anything: the cache does the same with and without a chronicle.
2. What neither may be read by others nor stays cached (``cache_write=False``) leaves no token
   behind when it ends.
3. Erasing a tenant leaves nothing of it, not even its name on what it evicted.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.visit import Visit
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES

LEAST_TOKENS = 65_536
"""Tokens that are remembered at least: 256 KiB."""

LEAST_LOSSES = 1024
"""Losses that are remembered at least."""

TOKENS_PER_SLOT = 4
"""Tokens remembered per slot of the pool: 16 bytes, beside a slot's kilobytes of KV."""

LossReason = Literal["evicted", "removed"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Blocks whose content was forgotten.

    Attributes:
        number: When, in the chronicle's numbers.
        reason: ``evicted`` for another's content, or ``removed`` by an administrator.
        at_s: When, by the clock.
        idle_s: Seconds since somebody held them.
        by: For whom; None if for nobody, or for somebody who was erased.
        identity: Whose they were.
        blocks: Which.
    """

    number: int
    reason: LossReason
    at_s: float
    idle_s: float
    by: Visit | None
    identity: Identity
    blocks: "array[int]"


class Chronicle:
    """Bounded memory of admissions and losses.

    Attributes:
        keep: Sequences that are remembered; 0 remembers nothing and costs nothing.
        block_size: Tokens per block.
        has_windows: Whether some layers have a sliding window, whose losses are not noted.
        acting: For whom blocks are being allocated.
        num_forgotten: Sequences that are no longer remembered.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        """Start with nothing to remember."""
        self.keep = config.keep_explanations
        self.block_size = config.block_size
        self.has_windows = bool(config.windows)
        self.acting: Visit | None = None
        self.num_forgotten = 0
        self._clock = clock
        self._most_tokens = max(LEAST_TOKENS, TOKENS_PER_SLOT * config.num_slots)
        self._num_tokens = 0
        self._number = 0
        self._visits: deque[Visit] = deque()
        self._losses: deque[Loss] = deque(maxlen=max(LEAST_LOSSES, config.num_blocks))
        # Who publishes in the running step, and which blocks; by block as far as somebody asked.
        self._publishing: list[tuple[Visit, array[int]]] = []
        self._in_step: dict[int, Visit] = {}
        self._num_asked = 0

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._visits)

    def visits(self) -> Iterator[Visit]:
        """Walk what is remembered, newest first."""
        return reversed(self._visits)

    def visit_of(self, name: str) -> Visit | None:
        """Return the first admission of the newest request of that name."""
        return next((v for v in self.visits() if v.is_first and v.name == name), None)

    def arrive(
        self, key: PrefixKey, blocks: "array[int]", num_copied: int, is_first: bool
    ) -> Visit | None:
        """Note that a sequence is admitted; whatever is lost now is lost for it.

        Args:
            key: The sequence.
            blocks: Whole blocks that hit.
            num_copied: Tokens copied behind them.
            is_first: Whether it did not run before.

        Returns:
            Its visit; None if nothing is remembered.
        """
        if not self.keep:
            return None
        size, num_tokens = self.block_size, len(key.tokens)
        self._number += 1
        visit = self.acting = Visit(
            self._number, key.identity, key.images, num_tokens, len(blocks) * size, num_copied,
            is_first=is_first, key=key, at_s=self._clock(), charge=num_tokens,
        )  # fmt: skip
        if self._publishing and len(blocks) and (writer := self._writers.get(blocks[-1])):
            visit.num_awaited = visit.num_shared - self.num_settled(blocks)
            visit.awaited = writer.name if writer.identity.tenant == key.identity.tenant else ""
        self._visits.append(visit)
        self._num_tokens += num_tokens
        if len(self._visits) > self.keep or self._num_tokens > self._most_tokens:
            self._trim()
        return visit

    def describe(
        self, visit: Visit, name: str, off: str, fields: tuple[tuple[str, str], ...]
    ) -> None:
        """Note what the cache does not know of a request.

        Args:
            visit: Its visit.
            name: Its name.
            off: The setting that kept it from reading the cache; empty if it read.
            fields: Names and texts of its messages and fields.
        """
        visit.name, visit.off, visit.fields = name, off, fields
        if fields:
            letters = sum(len(text) for _, text in fields)
            self._charge(visit, visit.charge + letters // TOKEN_BYTES)

    def waited(self, visit: Visit, since: int, name: str) -> None:
        """Note what was computed for others between a sequence's arrival and its admission.

        Args:
            visit: Who waited.
            since: Tokens that were cached when it arrived.
            name: For whom it waited; empty if that was another tenant's, behind one public head.
        """
        num_awaited = max(0, visit.num_shared - since)
        if num_awaited > visit.num_awaited:
            visit.num_awaited, visit.awaited = num_awaited, name or visit.awaited

    def num_settled(self, blocks: "array[int]") -> int:
        """Count the first tokens of a match that no running step computes."""
        # Whoever publishes a block in this step publishes all that come after it.
        settled = len(blocks)
        if self._publishing:
            settled = bisect_left(blocks, True, key=self._writers.__contains__)
        return settled * self.block_size

    def published(self, visit: Visit, blocks: "array[int]") -> None:
        """Note that blocks are findable in the running step."""
        self._publishing.append((visit, blocks))

    def step_ended(self) -> None:
        """Note that what was published in the step is now computed, or taken back."""
        if self._publishing:
            self._publishing, self._in_step, self._num_asked = [], {}, 0

    def leave(
        self,
        table: BlockTable,
        computed: int,
        findable: int,
        quotes: Sequence[tuple[bytearray, int]] | None,
    ) -> None:
        """Note that a sequence gives its blocks back.

        Args:
            table: Its table, whose blocks are not changed any more.
            computed: Its first tokens whose KV is or was there.
            findable: Its first tokens that others can find.
            quotes: What it published, as the index keeps it; None if only a copy would do.
        """
        visit, key = table.visit, table.key
        if visit is None or visit.key is None:
            return
        self._number += 1
        self.acting, visit.ended = visit, self._number
        visit.num_computed, visit.num_findable = computed, findable
        visit.blocks, visit.num_blocks = table.blocks, -(-findable // self.block_size)
        if visit.writes:
            visit.leave(key, quotes, table.num_published * self.block_size)
            more = len(key.tokens) - visit.num_prompt_tokens
            if more:
                self._charge(visit, visit.charge + more)
        else:
            visit.clear()

    def lost(
        self, reason: LossReason, entry: CacheEntry, blocks: "array[int]", idle_s: float
    ) -> None:
        """Note that blocks of an entry are forgotten."""
        if self.keep:
            by = self.acting if reason == "evicted" else None
            self._number += 1
            at_s = self._clock()
            self._losses.append(
                Loss(self._number, reason, at_s, idle_s, by, entry.identity, blocks)
            )

    def remembers_since(self, number: int) -> bool:
        """Whether every loss since a moment is remembered."""
        is_full = len(self._losses) == self._losses.maxlen
        return not is_full or self._losses[0].number <= number

    def loss_of(self, block: BlockId, after: int, before: int) -> Loss | None:
        """Find the first loss of a block between two moments.

        Cost: O(losses remembered).
        """
        for loss in self._losses:
            if after < loss.number < before and block in loss.blocks:
                return loss
        return None

    def forget(self, tenant: bytes) -> None:
        """Leave nothing of a tenant that has no live sequence, or of what is behind its head."""
        for visit in (mine := [v for v in self._visits if v.identity.belongs_to(tenant)]):
            self._drop(visit)
        self._visits = deque(v for v in self._visits if v not in mine)
        kept = [loss for loss in self._losses if not loss.identity.belongs_to(tenant)]
        self._losses = deque((_nameless(loss, tenant) for loss in kept), self._losses.maxlen)
        if self.acting is not None and self.acting.identity.belongs_to(tenant):
            self.acting = None

    def check(self) -> None:
        """Assert that what is remembered is within its bounds and counted rightly."""
        assert len(self._visits) <= self.keep, "more is remembered than was asked for"
        assert self._num_tokens == sum(v.charge for v in self._visits), "tokens are miscounted"
        assert self._num_tokens <= self._most_tokens or len(self._visits) <= 1, "too many tokens"
        for visit in self._visits:
            assert visit.writes or visit.ended is None or not visit.tokens, "rule 2"

    @property
    def _writers(self) -> dict[int, Visit]:
        """Blocks that the running step publishes; most steps end before anybody asks."""
        for visit, blocks in self._publishing[self._num_asked :]:
            self._in_step.update(dict.fromkeys(blocks, visit))
        self._num_asked = len(self._publishing)
        return self._in_step

    def _charge(self, visit: Visit, charge: int) -> None:
        """Say anew what a visit takes."""
        if visit.number < self._visits[0].number:
            return  # it was forgotten before it ended
        self._num_tokens += charge - visit.charge
        visit.charge = charge
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest visits while there are too many, or too many tokens."""
        while len(self._visits) > self.keep or (
            self._num_tokens > self._most_tokens and len(self._visits) > 1
        ):
            self._drop(self._visits.popleft())
            self.num_forgotten += 1

    def _drop(self, visit: Visit) -> None:
        """Forget a visit's content; losses may still name it."""
        self._num_tokens -= visit.charge
        visit.charge = 0
        visit.clear()


def _nameless(loss: Loss, tenant: bytes) -> Loss:
    """Return a loss that does not say who caused it, if that was a tenant's request."""
    if loss.by is None or not loss.by.identity.belongs_to(tenant):
        return loss
    return replace(loss, by=None)

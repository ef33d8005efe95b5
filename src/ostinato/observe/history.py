"""History of the cache: admitted requests, and lost blocks with their causes.

An observer of the cache, read by ``explain`` (law 10). It is bounded:

* the last ``keep_explanations`` sequences;
* their tokens: at most four times as many as the pool holds (4 bytes each, compared with
  kilobytes of KV), and never less than 65,536; a shared prefix counts for each of its sequences;
* the last losses: as many as the pool has blocks, and never less than 1,024.

A loss names blocks, not contents, so that its cost does not depend on the prefix's length. The
content follows from the record that had those blocks, and from the order of numbers: the first
loss of a block after its record ended is the loss of that content.

Rules:

1. Nothing here decides anything: the cache does the same with and without a history.
2. When a request with ``cache_write=False`` ends, none of its tokens is kept, only digests of
   its prefixes under a key that never leaves this process.
3. Erasing a tenant removes everything of it, even its name on what it evicted.

A record begins at admission and ends when the blocks are released. While the sequence lives, its
tokens are the live ones; afterwards they are kept beside the blocks that held them, so that it can
be said later which of them were lost::

    tokens     ABCD EFGH IJ
    blocks     7    9    3
    findable   all ten of them if the partial block was published, else the first eight
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.prefix_index import PublishResult
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.request import RequestContext
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.observe.prefix_digests import DigestKey, PrefixDigests
from ostinato.settings import PrefixCacheConfig


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sequence that was admitted.

    Attributes:
        number: Its number in the history.
        identity: Its identity.
        images: Images among its tokens.
        num_prompt_tokens: Tokens at its admission.
        num_shared: Of those, how many hit in whole blocks.
        num_copied: How many were copied after them.
        num_seen: How many had cached blocks, if a state was missing to use all of them.
        num_awaited: How many of the shared ones another request computed after this one arrived,
            or in the same step; they are the last of the shared ones.
        awaited: The request that computed them.
        at_s: When it was admitted, by the clock.
        name: The request's.
        is_first: Whether this was the request's first admission, the one that is explained.
        writes: Whether it writes to the cache.
        off: The setting that kept it from reading the cache; empty if it read.
        prompt_sections: Names and texts of the request's messages and fields, in order.
        num_kept: Prompt tokens of earlier answers that stand as they were generated.
        table_id: Id of its block table.
        key: The live sequence; None when it has ended.
        kept: Its packed tokens when it has ended, made when they are first read; empty if
            none are kept.
        unpacked: Its tokens until then, of which the first ``num_unpacked`` count: a preempted
            sequence continues in the same array.
        num_unpacked: See ``unpacked``.
        digests: If no token is kept, digests of its prefixes.
        num_computed: Its first tokens that were computed or hit.
        num_findable: Its first tokens that others could find when it ended.
        blocks: The blocks that held them, perhaps with more at the end.
        num_blocks: How many of them others could find.
        ended: When its blocks were released, in the history's numbers; None while it runs.
        charge: What it takes of the history's memory, in tokens.
    """

    number: int
    table_id: int
    identity: Identity
    images: tuple[ImageSpan, ...]
    num_prompt_tokens: int
    num_shared: int
    num_copied: int
    num_seen: int = 0
    num_awaited: int = 0
    awaited: str = ""
    at_s: float = 0.0
    name: str = ""
    is_first: bool = True
    writes: bool = True
    off: str = ""
    prompt_sections: tuple[tuple[str, str], ...] = ()
    num_kept: int = 0
    key: PrefixKey | None = None
    kept: bytes = b""
    unpacked: "array[int] | None" = None
    num_unpacked: int = 0
    digests: PrefixDigests | None = None
    num_computed: int = 0
    num_findable: int = 0
    blocks: Sequence[int] = ()
    num_blocks: int = 0
    ended: int | None = None
    charge: int = 0

    @property
    def tokens(self) -> bytes:
        """Its tokens as far as known, packed; copied when they are first read."""
        if self.key is not None:
            return self.key.tokens.tobytes()
        if self.unpacked is not None:
            self.kept, self.unpacked = self.unpacked[: self.num_unpacked].tobytes(), None
        return self.kept

    @property
    def prompt(self) -> bytes:
        """Packed tokens of its prompt; empty if none are kept."""
        return self.tokens[: self.num_prompt_tokens * TOKEN_BYTES]

    @property
    def num_hits(self) -> int:
        """Prompt tokens that it did not compute."""
        return self.num_shared + self.num_copied

    def lived_at(self, number: int) -> bool:
        """Whether it was running at that number of the history."""
        return self.number < number and (self.ended is None or self.ended > number)

    def num_common(self, other: "RequestRecord", tokens: bytes) -> int:
        """Return the length of its common prefix with another's prompt.

        Images are compared, identities are not.
        """
        common = num_common_tokens(self.tokens, tokens)
        images, other_images = set(self.images), set(other.images)
        return min([common, *(image.start for image in images ^ other_images)])

    def clear(self) -> None:
        """Drop its content."""
        self.key, self.kept, self.images, self.prompt_sections = None, b"", (), ()
        self.unpacked, self.num_unpacked, self.digests = None, 0, None
        self.blocks, self.num_blocks = (), 0


MIN_TOKENS = 65_536
"""Minimum number of remembered tokens: 256 KiB."""

MIN_LOSSES = 1024
"""Minimum number of remembered losses."""

TOKENS_PER_SLOT = 4
"""Tokens remembered per slot of the pool: 16 bytes, beside a slot's kilobytes of KV."""

LossReason = Literal["space", "quota", "removed"]


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Blocks that lost their content.

    Attributes:
        number: When, in the history's numbers.
        reason: ``space`` for another's content, ``quota`` for its own tenant's quota, or
            ``removed`` by an administrator.
        at_s: When, by the clock.
        idle_s: Seconds since their last use.
        by: The request that caused it; None if none did, or its tenant was erased.
        identity: Whose they were.
        blocks: Which.
    """

    number: int
    reason: LossReason
    at_s: float
    idle_s: float
    by: RequestRecord | None
    identity: Identity
    blocks: "array[int]"


class RequestHistory(CacheObserver):
    """Bounded memory of admissions and losses.

    Attributes:
        keep: Sequences that are remembered; 0 remembers nothing.
        block_size: Tokens per block.
        has_windows: Whether some layers have a sliding window, whose losses are not noted.
        num_forgotten: Sequences that are no longer remembered.
    """

    def __init__(self, config: PrefixCacheConfig, clock: Callable[[], float]) -> None:
        """Start empty."""
        self.keep = config.keep_explanations
        self.block_size = config.block_size
        self.has_windows = bool(config.windows)
        self.num_forgotten = 0
        self.digest_key = DigestKey()
        self._is_on = config.enable_prefix_caching
        self._clock = clock
        self._max_tokens = max(MIN_TOKENS, TOKENS_PER_SLOT * config.num_slots)
        self._num_tokens = 0
        self._number = 0
        self._records: deque[RequestRecord] = deque()
        self._by_table: dict[int, RequestRecord] = {}
        self._losses: deque[BlockLoss] = deque(maxlen=max(MIN_LOSSES, config.num_blocks))
        # Records and blocks that the running step publishes; by block as far as was looked up.
        self._publishing: list[tuple[RequestRecord, array[int]]] = []
        self._in_step: dict[int, RequestRecord] = {}
        self._num_indexed = 0

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._records)

    def records(self) -> Iterator[RequestRecord]:
        """Walk the records, newest first."""
        return reversed(self._records)

    def record_of(self, name: str) -> RequestRecord | None:
        """Return the first admission of the newest request of that name."""
        return next((r for r in self.records() if r.is_first and r.name == name), None)

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Add a record; evictions from now on are for its sequence."""
        blocks = table.blocks
        letters = 0
        for _, text in context.prompt_sections:
            letters += len(text)
        is_first, extra = not context.is_readmission, letters // TOKEN_BYTES
        record = self._begin(table, blocks, is_first, extra)
        record.name, record.prompt_sections = context.name, context.prompt_sections
        record.num_kept = context.num_kept_tokens
        record.off = context.off if self._is_on else "enable_prefix_caching=False"
        if context.num_known_tokens is not None:
            num_awaited = max(0, record.num_shared - context.num_known_tokens)
            if num_awaited > record.num_awaited:
                record.num_awaited = num_awaited
                record.awaited = context.waits_for or record.awaited

    def on_fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Add a record of a second continuation."""
        record = self._begin(child, child.blocks, is_first=False)
        record.num_shared = child.num_published * self.block_size
        if (of_parent := self._by_table.get(parent.table_id)) is not None:
            record.name = of_parent.name

    def _begin(
        self, table: BlockTable, blocks: "array[int]", is_first: bool, extra: int = 0
    ) -> RequestRecord:
        """Begin a record that takes as much as its tokens and ``extra`` ones."""
        key, num_tokens = table.key, len(table.key.tokens)
        self._number += 1
        record = RequestRecord(
            self._number, table.table_id, key.identity, key.images, num_tokens,
            table.num_shared_tokens, table.num_copied_tokens, table.num_seen_tokens,
            is_first=is_first,
            writes=table.writes, key=key, at_s=self._clock(), charge=num_tokens + extra,
        )  # fmt: skip
        if self._publishing and len(blocks) and (writer := self._writers.get(blocks[-1])):
            record.num_awaited = len(blocks) * self.block_size - self._num_settled(blocks)
            is_same_tenant = writer.identity.tenant == key.identity.tenant
            record.awaited = writer.name if is_same_tenant else ""
        self._records.append(record)
        self._by_table[table.table_id] = record
        self._num_tokens += num_tokens + extra
        if len(self._records) > self.keep or self._num_tokens > self._max_tokens:
            self._trim()
        return record

    def _num_settled(self, blocks: "array[int]") -> int:
        """Count the first tokens of a match that no running step computes."""
        # A request that publishes a block in this step publishes all that come after it.
        return bisect_left(blocks, True, key=self._writers.__contains__) * self.block_size

    def on_publish(
        self, table: BlockTable, first: int, last: int, result: PublishResult, group: int = 0
    ) -> None:
        """Add blocks that the running step publishes."""
        record = self._by_table.get(table.table_id)
        if group == 0 and record is not None:
            self._publishing.append((record, table.blocks[first:last]))

    def on_settle(self) -> None:
        """Note that what was published in the step is now computed, or retracted."""
        if self._publishing:
            self._publishing, self._in_step, self._num_indexed = [], {}, 0

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """End a record, and keep its tokens or digests."""
        record, key = self._by_table.get(table.table_id), table.key
        if record is None or record.key is None:
            return
        self._number += 1
        record.ended = self._number
        record.num_computed, record.num_findable = num_tokens, num_findable
        record.blocks, record.num_blocks = table.blocks, -(-num_findable // self.block_size)
        if record.writes:
            record.key, record.unpacked, record.num_unpacked = None, key.tokens, len(key.tokens)
            self._charge(record, len(key.tokens) - record.num_prompt_tokens)
        else:
            digests = self.digest_key.digests(key.tokens[:num_tokens].tobytes(), self.block_size)
            record.clear()
            record.digests = digests

    def on_evict(self, eviction: Eviction) -> None:
        """Add a loss."""
        if eviction.group:
            return
        by = None if eviction.table is None else self._by_table.get(eviction.table.table_id)
        self._number += 1
        at_s, entry = self._clock(), eviction.entry
        blocks, idle_s = eviction.removal.blocks, at_s - entry.idle_since_s
        loss = BlockLoss(self._number, eviction.cause, at_s, idle_s, by, entry.identity, blocks)
        self._losses.append(loss)

    def remembers_since(self, number: int) -> bool:
        """Whether every loss since a moment is remembered."""
        is_full = len(self._losses) == self._losses.maxlen
        return not is_full or self._losses[0].number <= number

    def loss_of(self, block: BlockId, after: int, before: int) -> BlockLoss | None:
        """Find the first loss of a block between two moments.

        Cost: O(losses remembered).
        """
        for loss in self._losses:
            if after < loss.number < before and block in loss.blocks:
                return loss
        return None

    def erase(self, tenant: bytes) -> int:
        """Erase a tenant that has no live sequence, and what continues its public prefix."""
        gone = [r for r in self._records if r.identity.belongs_to(tenant)]
        for record in gone:
            self._drop(record)
        self._records = deque(r for r in self._records if r not in gone)
        kept = [loss for loss in self._losses if not loss.identity.belongs_to(tenant)]
        self._losses = deque((_nameless(loss, tenant) for loss in kept), self._losses.maxlen)
        return 0

    def check(self) -> None:
        """Assert that the records are within their bounds and counted correctly."""
        assert len(self._records) <= self.keep, "more records than keep_explanations"
        assert self._num_tokens == sum(v.charge for v in self._records), "tokens are miscounted"
        assert self._num_tokens <= self._max_tokens or len(self._records) <= 1, "too many tokens"
        for record in self._records:
            assert record.writes or record.ended is None or not record.tokens, "rule 2"

    @property
    def _writers(self) -> dict[int, RequestRecord]:
        """Blocks that the running step publishes; most steps end before anybody asks."""
        for record, blocks in self._publishing[self._num_indexed :]:
            self._in_step.update(dict.fromkeys(blocks, record))
        self._num_indexed = len(self._publishing)
        return self._in_step

    def _charge(self, record: RequestRecord, num_tokens: int) -> None:
        """Let a record take ``num_tokens`` more, unless it was dropped before it ended."""
        if record.number >= self._records[0].number:
            self._num_tokens += num_tokens
            record.charge += num_tokens
            if self._num_tokens > self._max_tokens:
                self._trim()

    def _trim(self) -> None:
        """Drop the oldest records while there are too many, or too many tokens."""
        while len(self._records) > self.keep or (
            self._num_tokens > self._max_tokens and len(self._records) > 1
        ):
            self._drop(self._records.popleft())
            self.num_forgotten += 1

    def _drop(self, record: RequestRecord) -> None:
        """Drop a record's content; losses may still name it."""
        self._num_tokens -= record.charge
        record.charge = 0
        self._by_table.pop(record.table_id, None)
        record.clear()


def _nameless(loss: BlockLoss, tenant: bytes) -> BlockLoss:
    """Return a loss that does not say who caused it, if that was a tenant's request."""
    if loss.by is None or not loss.by.identity.belongs_to(tenant):
        return loss
    return replace(loss, by=None)

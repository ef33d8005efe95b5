"""Computes the prompt that will follow an answer, while the engine is idle.

Some chat templates drop text of earlier turns at the next user message. What that prompt will be is
then known up to the user's words as soon as the answer ends, and none of it after the dropped text
is cached::

    answered   <user> question <assistant> <think> reasoning </think> answer <end>
    prepared   <user> question <assistant> answer <end> <user>
                                           └─ start ────────── end ┘ computed in idle steps

Who answered offers the head of the next prompt, by the name of the request that it follows. It is
computed by the real scheduler as an ordinary request, of the same identity and the lowest priority,
``PIECE_TOKENS`` at a time, or fewer where a step may not take so long while others wait. That is
one step, between two looks for commands, so a request that arrives waits for one such step at most.
Nothing is live between two steps.

Inside a tool loop the head ends before the result. That of the next call continues it, and takes
its rows over, so that at the end of a loop little is left to compute. Pieces are smaller there,
since the result may come at any moment.

The next request of that identity which begins like a head settles it: rows that it hit were used,
the others wasted. Where less than a third is used, a tenant's heads are prepared no more.
"""

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from ostinato.assembly import PrefixCache
from ostinato.core.errors import OstinatoError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import RequestId
from ostinato.core.plan import StepPlan, StepResult
from ostinato.core.request import IDLE_WORK, Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.engine.loop.recorder import TraceRecorder
from ostinato.engine.requests.request_state import RequestState
from ostinato.sched.scheduler import Scheduler
from ostinato.sched.sequence import Sequence

logger = logging.getLogger("ostinato")

PIECE_TOKENS = 128
"""Tokens computed at a time: a request that arrives meanwhile waits for these at most."""

LOOP_PIECE_TOKENS = 32
"""The same inside a tool loop, where the next request is a result, and comes sooner than words."""

POOL_SHARE = 1 / 8
"""Share of the pool that one tenant's prepared rows may have until they are used."""

MAX_BYTES = 2 * 2**30
"""Bytes of keys and values of one tenant's prepared rows until they are used: 19,000 tokens of a
model of 0.6 billion parameters, and a loop of ten calls in large files."""

MAX_HEADS = 16
"""Heads of one tenant that wait for their next request; the oldest one is wasted for another."""

TRIAL_ROWS = 2048
"""Settled rows after which a tenant is judged."""

MAX_TENANTS, MAX_TICKETS, MAX_NAMES = 1024, 256, 1024

_PRIORITY = 2**31 - 1
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class RebaseCounts:
    """Rows, one per token, that were computed for prompts to come.

    Attributes:
        computed: In idle steps.
        used: Hit by the next request.
        wasted: Not hit by it, or given up.
        heads: Heads that were offered and had rows to compute.
        late: Heads whose next request came before anything was computed.
        stopped: Tenants for which fewer than a third were used.
        queued: Heads with rows to compute in idle steps to come.
    """

    computed: int = 0
    used: int = 0
    wasted: int = 0
    heads: int = 0
    late: int = 0
    stopped: int = 0
    queued: int = 0

    @property
    def pending(self) -> int:
        """Rows that wait for their next request."""
        return self.computed - self.used - self.wasted

    def __add__(self, other: "RebaseCounts") -> "RebaseCounts":
        """Return both together."""
        names = self.__dataclass_fields__
        return RebaseCounts(**{n: getattr(self, n) + getattr(other, n) for n in names})


@dataclass(eq=False, slots=True)
class _Head:
    """The known beginning of a next prompt.

    Attributes:
        key: Identity and tokens.
        start: Tokens that were cached when it was offered.
        end: Tokens that are cached now, as far as this work knows.
        in_loop: Whether a call was answered, whose result comes before a user's words.
    """

    key: PrefixKey
    start: int
    end: int
    in_loop: bool = False

    @property
    def is_whole(self) -> bool:
        return self.end >= len(self.key.tokens)

    def num_common_rows(self, key: PrefixKey) -> int:
        """Return how many of its rows another prompt has."""
        return max(0, self.key.num_common_tokens(key) - self.start)


@dataclass(slots=True)
class _Account:
    """What one tenant has prepared."""

    counts: RebaseCounts = field(default_factory=RebaseCounts)
    heads: deque[_Head] = field(default_factory=deque)  # oldest first

    def add(self, **more: int) -> None:
        self.counts = self.counts + RebaseCounts(**more)

    @property
    def is_stopped(self) -> bool:
        used, settled = self.counts.used, self.counts.used + self.counts.wasted
        return settled >= TRIAL_ROWS and 3 * used < settled


class IdleRebase:
    """Prepares heads of prompts to come, for one engine; called between steps.

    Attributes:
        is_on: Whether the setting and the chat template ask for it.
    """

    def __init__(
        self,
        is_on: bool,
        cache: PrefixCache,
        scheduler: Scheduler,
        execute: Callable[[StepPlan], StepResult],
        row_bytes: int,
        recorder: TraceRecorder,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        """Prepare nothing yet.

        Args:
            is_on: Whether anything is prepared at all.
            cache: Where rows are published.
            scheduler: Plans the steps.
            execute: Runs a planned step; may raise anything.
            row_bytes: Of the keys and values of one token.
            recorder: Records the steps, if a recording runs.
            piece_tokens: Tokens to compute in one step at most.
        """
        self.is_on = is_on
        self._cache, self._scheduler, self._execute = cache, scheduler, execute
        self._recorder = recorder
        rows = int(cache.config.num_blocks * cache.block_size * POOL_SHARE)
        self._max_rows = min(rows, MAX_BYTES // max(1, row_bytes))
        # Models with states keep one per piece, so theirs are computed in one.
        self._piece = None if cache.config.states is not None else piece_tokens
        self._tickets: OrderedDict[str, Identity] = OrderedDict()  # of answered requests, by name
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()  # by owner, last used last
        self._queue: deque[_Head] = deque()  # heads with rows to compute
        self._used_by: OrderedDict[str, int] = OrderedDict()  # rows, by the request that hit them
        self._past = RebaseCounts()  # of tenants that have no account any more
        self._numbers = count()

    # --- what the engine tells ---

    def note_answer(self, state: RequestState) -> None:
        """Accept one offer for a request that has ended with an answer; others get none."""
        request = state.request
        params, is_sound = request.params, not request.images and state.error is None
        has_answer = params.n == 1 and params.readout is None
        if has_answer and is_sound and request.cache_read and request.cache_write:
            self._tickets[request.request_id] = request.identity
            _bound(self._tickets, MAX_TICKETS)

    def note_request(self, request: Request) -> None:
        """Settle the heads that a new request continues, before it is admitted."""
        account = self._accounts.get(request.identity.owner)
        if account is None:
            return
        key = PrefixKey(request.identity, request.prompt_token_ids, request.images)
        hit = self._cache.manager.match(key).num_tokens if request.cache_read else 0
        for head in list(account.heads):
            # A result's prompt parts from the head of its loop within the first block.
            slack = self._cache.block_size if head.in_loop else 0
            num_common = head.num_common_rows(key)
            if head.key.identity == key.identity and num_common > slack:
                num_used = max(0, min(hit, head.start + num_common, head.end) - head.start)
                self._settle(account, head, num_used)
                if num_used:
                    known = self._used_by.get(request.request_id, 0)
                    self._used_by[request.request_id] = known + num_used
                    _bound(self._used_by, MAX_NAMES)

    def rows_used_by(self, request_id: str) -> int:
        """Return how many prepared rows a request has hit; 0 if that is not remembered."""
        return self._used_by.get(request_id, 0)

    @property
    def heads(self) -> list[_Head]:
        """Beginnings of prompts that wait for their next request, of all tenants."""
        return [head for account in list(self._accounts.values()) for head in account.heads]

    @property
    def counts(self) -> RebaseCounts:
        """Rows of all tenants."""
        total = replace(self._past, queued=len(self._queue))
        for account in self._accounts.values():
            total = total + replace(account.counts, stopped=int(account.is_stopped))
        return total

    def is_prepared(self, request_id: str) -> bool:
        """Whether an offer for a request would be taken, so that rendering it is worth while."""
        identity = self._tickets.get(request_id)
        account = None if identity is None else self._accounts.get(identity.owner)
        return identity is not None and not (account is not None and account.is_stopped)

    # --- what callers offer ---

    def offer(
        self, request_id: str, identity: Identity, tokens: "array[int]", in_loop: bool = False
    ) -> bool:
        """Prepare the head of the prompt that follows an answered request.

        Args:
            request_id: The request; each one takes one offer.
            identity: Of the next request, as of the answered one.
            tokens: What is known of its prompt, packed, shape (num_tokens,).
            in_loop: Whether it was answered by a call, so that a result comes first.

        Returns:
            Whether there is something to compute. What is above the tenant's budget is left out.
        """
        if not self.is_prepared(request_id) or self._tickets.pop(request_id) != identity:
            return False
        key = PrefixKey(identity, tokens)
        num_cached = self._cache.manager.match(key, len(tokens)).num_tokens
        is_long = len(tokens) >= self._scheduler.config.max_model_len
        is_short = len(tokens) - num_cached < self._cache.block_size
        if is_short or is_long or (in_loop and self._piece is None):
            return False
        account = self._accounts.setdefault(identity.owner, _Account())
        self._accounts.move_to_end(identity.owner)
        start, end = self._take_over(account, key) or (num_cached, num_cached)
        key = PrefixKey(identity, tokens[: start + self._max_rows])
        missing = len(key.tokens) - start
        while account.heads and (
            len(account.heads) >= MAX_HEADS
            or self._planned_rows(account) + missing > self._max_rows
        ):
            self._give_up(account, account.heads[0])
        head = _Head(key, start, end, in_loop)
        account.heads.append(head)
        account.add(heads=1)
        self._queue.append(head)
        self._bound_accounts()
        return True

    def _take_over(self, account: _Account, key: PrefixKey) -> tuple[int, int] | None:
        """End the head that a new one continues; returns the start and the end of its rows.

        That is the newest whose rows are mostly those of the new one; the others are wasted.
        """
        for head in reversed(account.heads):
            num_common = head.num_common_rows(key)
            if head.in_loop and 2 * num_common > len(head.key.tokens) - head.start:
                num_kept = min(num_common, head.end - head.start)
                account.add(wasted=head.end - head.start - num_kept)
                account.heads.remove(head)
                if head in self._queue:
                    self._queue.remove(head)
                return head.start, head.start + num_kept
        return None

    # --- idle steps ---

    def run_idle_work(self) -> bool:
        """Compute one piece, in one step; returns whether there is more to compute.

        Effects: blocks are allocated and published as for any request of the tenant. Its own heads
        are given up before the eviction policy chooses among blocks that no request holds.
        """
        if not self._queue or self._scheduler.has_work:
            return False
        head = self._queue[0]
        if head.key.identity.epoch != self._cache.manager.epoch:
            self._drop(head)
        elif not self._advance(head) or head.is_whole:
            self._queue.popleft()
        return bool(self._queue)

    def _advance(self, head: _Head) -> bool:
        """Compute the next piece of a head; returns whether that brought it further."""
        manager, tokens = self._cache.manager, head.key.tokens
        cached = manager.match(head.key, len(tokens)).num_tokens
        stop = min(len(tokens), cached + self._piece_tokens(cached, head.in_loop))
        if stop <= cached:
            head.end = len(tokens)
            return True
        account = self._accounts[head.key.identity.owner]
        self._make_room(account, head, stop - cached)
        name = RequestId(f"{IDLE_WORK}{next(self._numbers)}")
        request = Request(
            name, tokens[:stop], _PARAMS, identity=head.key.identity, priority=_PRIORITY
        )
        self._recorder.tick()
        try:
            self._scheduler.add(request, (0,))
        except OstinatoError as error:
            logger.debug("a prompt is not prepared: %s", error)
            return False
        self._recorder.on_added(request, self._recorder.clock())
        end = self._run_step(name)
        num_new = max(0, min(end, stop) - max(head.end, cached))
        head.end = max(head.end, min(end, stop))
        account.add(computed=num_new)
        return num_new > 0

    def _piece_tokens(self, start: int, in_loop: bool) -> int:
        """Return how many tokens to compute next: what a step may take while others wait."""
        if self._piece is None:
            return 2**31
        piece = min(self._piece, LOOP_PIECE_TOKENS) if in_loop else self._piece
        room = self._scheduler.costs.begin([], [start], is_alone=False)
        return max(self._cache.block_size, min(piece, room.max_chunk_tokens(start)))

    def _run_step(self, name: RequestId) -> int:
        """Run one step, and end its request; returns how many tokens of it are computed."""
        [sequence] = self._scheduler.requests.live[name]
        self._recorder.begin_step()
        plan = self._scheduler.plan()
        if not plan.sequences:  # all blocks are held
            self._cancel(name)
            return 0
        end = plan.sequences[0].end
        try:
            result = self._execute(plan)
        except BaseException as error:
            self._fail(sequence)
            if not isinstance(error, Exception):
                raise
            logger.exception("a step failed that prepared a prompt")
            return 0
        self._recorder.end_step()
        self._scheduler.commit(result)
        if sequence.finish_reason is None:
            self._cancel(name)
        else:
            self._recorder.record_output(sequence)
            self._recorder.on_ended(name)
        return end

    def _cancel(self, name: RequestId) -> None:
        """End a request between steps; what is computed stays findable."""
        self._recorder.tick()
        self._recorder.on_cancelled(name, self._scheduler.cancel(name))

    def _fail(self, sequence: Sequence) -> None:
        self._recorder.fail_step()
        self._scheduler.fail()
        self._recorder.record_output(sequence)
        self._recorder.on_ended(sequence.request.request_id)

    def _make_room(self, account: _Account, head: _Head, num_tokens: int) -> None:
        """Give up the tenant's older heads where too few blocks are without content."""
        needed = -(-num_tokens // self._cache.block_size) + 1
        for other in list(account.heads):
            if all(pool.num_unused >= needed for pool in self._cache.manager.pools):
                return
            if other is not head and other.end > other.start:
                self._give_up(account, other)

    # --- endings ---

    def erase(self, tenant: bytes | None = None) -> None:
        """Forget all of a tenant, or of all; nothing of it is prepared any more."""
        self._remove(lambda identity: tenant is None or identity.belongs_to(tenant))
        for owner in [o for o in self._accounts if tenant is None or o == tenant]:
            self._close(owner)
        if tenant is None:
            self._used_by.clear()

    def remove_adapter(self, adapter: bytes) -> None:
        """Prepare nothing for an adapter that is no longer loaded."""
        self._remove(lambda identity: identity.adapter == adapter)

    def _remove(self, matches: Callable[[Identity], bool]) -> None:
        for name in [n for n, identity in self._tickets.items() if matches(identity)]:
            del self._tickets[name]
        for head in [h for h in self.heads if matches(h.key.identity)]:
            self._drop(head)

    def _give_up(self, account: _Account, head: _Head) -> None:
        """Settle a head that was not used, and free its blocks."""
        self._settle(account, head, 0)
        if head.end > head.start:
            self._free(head)

    def _drop(self, head: _Head) -> None:
        account = self._accounts.get(head.key.identity.owner)
        if account is not None and head in account.heads:
            self._settle(account, head, 0)
        elif head in self._queue:
            self._queue.remove(head)

    def _settle(self, account: _Account, head: _Head, num_used: int) -> None:
        account.heads.remove(head)
        if head in self._queue:
            self._queue.remove(head)
        num_computed = head.end - head.start
        account.add(used=num_used, wasted=num_computed - num_used, late=int(num_computed == 0))

    def _free(self, head: _Head) -> None:
        """Remove the blocks of a head from the cache, where no request holds or continues them."""
        if self._recorder.path is not None:
            return  # a replay could not repeat it
        manager, first = self._cache.manager, head.start // self._cache.block_size
        own = set(manager.match(head.key, head.end).blocks[first:])
        if own:
            manager.remove(lambda entry: bool(entry.blocks) and own.issuperset(entry.blocks))
            manager.settle()

    def _planned_rows(self, account: _Account) -> int:
        """Return the rows that a tenant's heads have, or will have."""
        return sum(len(head.key.tokens) - head.start for head in account.heads)

    def _bound_accounts(self) -> None:
        while len(self._accounts) > MAX_TENANTS:
            self._close(next(iter(self._accounts)))

    def _close(self, owner: bytes) -> None:
        """Keep a tenant's numbers in the total alone."""
        account = self._accounts[owner]
        for head in list(account.heads):
            self._settle(account, head, 0)
        self._past = self._past + account.counts
        del self._accounts[owner]


def _bound(table: "OrderedDict[str, int] | OrderedDict[str, Identity]", max_entries: int) -> None:
    while len(table) > max_entries:
        table.popitem(last=False)

"""Records a trace of an engine, for replays.

It has what a replay repeats: requests as they arrive and end, the times of steps, resets,
erasures, leases and new weights, but no content: see ``traces.format``. While a recording runs, the
cache's clock is frozen between two entries, so that a policy sees the same times in a replay, to
the microsecond.

Rules:

1. Every method is called between steps, or by the step itself, in one thread at a time.
2. An error in here ends the recording and is logged; it never reaches the engine.
"""

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from ostinato.core.identity import PrefixKey
from ostinato.core.ids import RequestId
from ostinato.core.request import Request
from ostinato.engine.loop.trace_writer import TraceWriter
from ostinato.sched.sequence import Sequence
from ostinato.settings import PrefixCacheConfig
from ostinato.tenants.terms import LeaseId, LeaseTerms
from ostinato.traces import format as trace
from ostinato.traces.anonymizer import ChainedHash, TokenHasher

STEPS_PER_LINE = 128
"""Steps that share a line, if nothing else happens between them."""

P = ParamSpec("P")


class FreezableClock:
    """A monotonic clock that can be frozen, so that all between two entries has one time."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._frozen_s: float | None = None

    def __call__(self) -> float:
        """Return seconds."""
        return self._source() if self._frozen_s is None else self._frozen_s

    def freeze(self) -> int:
        """Stop at the current microsecond, and return it."""
        microseconds = int(self._source() * 1_000_000)
        self._frozen_s = microseconds / 1_000_000
        return microseconds

    def unfreeze(self) -> None:
        """Run again."""
        self._frozen_s = None


@dataclass(slots=True)
class _Live:
    """A request that was recorded and has not ended."""

    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)


def _never_raises(
    method: "Callable[Concatenate[TraceRecorder, P], None]",
) -> "Callable[Concatenate[TraceRecorder, P], None]":
    """Do nothing while no recording runs; end the recording if a method raises (rule 2)."""

    @wraps(method)
    def guarded(self: "TraceRecorder", /, *args: P.args, **kwargs: P.kwargs) -> None:
        writer = self._writer
        if writer is None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            writer.give_up(f"{type(error).__name__}: {error}")
        if writer.failed:
            self._end()

    return guarded


class TraceRecorder:
    """Writes a trace of one engine, or nothing while no recording runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = FreezableClock(clock)  # for the cache; frozen while a recording runs
        self._writer: TraceWriter | None = None
        self._names = TokenHasher()
        self._live: dict[RequestId, _Live] = {}
        self._chains: dict[int, ChainedHash] = {}  # used by the writer's thread only
        self._start_us = self._now_us = self._planned_us = 0
        self._num_steps = self._num_requests = 0
        self._times: list[int] = []

    @property
    def path(self) -> Path | None:
        """Where the recording that runs is written; None if none runs."""
        return None if self._writer is None else self._writer.path

    def start(self, path: Path, cache: PrefixCacheConfig, **engine: Any) -> None:
        """Begin a recording to a new file; raises ``ConfigError`` if it cannot be made.

        Args:
            path: The file.
            cache: The settings of the cache.
            **engine: Further fields of ``Header`` that describe the engine.
        """
        assert self._writer is None, "one recording at a time"
        self._writer = TraceWriter(path)
        self._names, self._live, self._chains = TokenHasher(), {}, {}
        self._num_steps = self._num_requests = 0
        self._times = []
        self._start_us = self._now_us = self.clock.freeze()
        names = self._names
        tenant_shares = {names.salt(t).encode(): share for t, share in cache.tenant_shares.items()}
        header = trace.TraceHeader(
            version=trace.VERSION,
            cache=replace(cache, tenant_shares=tenant_shares),
            start_us=self._start_us,
            unix_s=time.time(),
            **engine,
        )
        self._writer.put(lambda: header)

    def stop(self) -> Path | None:
        """End the recording, and return its path; None if none ran."""
        writer, path = self._writer, self.path
        self.tick()
        for request_id in list(self._live):
            self.on_ended(request_id)
        self._record_stop()
        if writer is not None:
            writer.close()
        self._end()
        return path

    @_never_raises
    def tick(self) -> None:
        """Advance the clock to now; called before each call of the cache that reads the time."""
        self._now_us = self.clock.freeze()

    @_never_raises
    def on_added(self, request: Request, arrival_s: float) -> None:
        """Record a request that was added."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        self._live[request.request_id] = _Live(number)
        arrival_us = int(arrival_s * 1_000_000) - self._start_us
        step, at_us, chains = self._num_steps, self._at_us, self._chains

        def line() -> trace.Added:
            chain = self._names.prompt(request.prompt_token_ids, request.images)
            chains[number] = chain
            return trace.Added(
                step=step,
                at_us=at_us,
                request=number,
                arrival_us=arrival_us,
                prompt=bytes(chain.names),
                tenant=self._names.salt(request.identity.tenant),
                adapter=self._names.name(request.identity.adapter),
                adapter_start=request.identity.adapter_start,
                head=self._names.public_prefix(request.identity),
                epoch=request.identity.epoch,
                images=tuple(
                    trace.Image(self._names.name(i.digest), i.start, i.length)
                    for i in request.images
                ),
                n=request.params.n,
                max_tokens=request.params.max_tokens,
                priority=request.priority,
                cache_read=request.cache_read and request.params.pooling != "mean",
                cache_write=request.cache_write,
                prompt_logprobs=request.params.prompt_logprobs is not None,
                prompt_logprob_start=request.params.prompt_logprob_start,
            )

        self._put(line)

    @_never_raises
    def begin_step(self) -> None:
        """Advance the clock to now, when a step is planned."""
        self._now_us = self.clock.freeze()
        self._planned_us = self._at_us

    @_never_raises
    def end_step(self) -> None:
        """Advance the clock to now, when the step is committed, and record it."""
        self._now_us = self.clock.freeze()
        self._times += self._planned_us, self._at_us
        self._num_steps += 1
        if len(self._times) >= 2 * STEPS_PER_LINE:
            self._put_steps()

    @_never_raises
    def fail_step(self) -> None:
        """Advance the clock to now, and record that the step failed."""
        self._now_us = self.clock.freeze()
        step, times_us = self._num_steps, (self._planned_us, self._at_us)
        self._put(lambda: trace.Failed(step=step, times_us=times_us))
        self._num_steps += 1

    @_never_raises
    def record_output(self, sequence: Sequence) -> None:
        """Record a continuation that got a token or ended."""
        live = self._live.get(sequence.request.request_id)
        if live is not None:
            live.sequences[sequence.index] = sequence

    @_never_raises
    def on_cancelled(self, request_id: RequestId, sequences: Iterable[Sequence]) -> None:
        """Record that a request was cancelled."""
        live = self._live.get(request_id)
        if live is not None:
            live.sequences |= {sequence.index: sequence for sequence in sequences}
            self._put_at(partial(trace.Cancelled, request=live.number))
            self.on_ended(request_id)

    @_never_raises
    def on_ended(self, request_id: RequestId) -> None:
        """Record that all continuations of a request ended, and how many tokens hit."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        step, at_us, chains = self._num_steps, self._at_us, self._chains
        members = [live.sequences[index] for index in sorted(live.sequences)]
        first = members[0] if members else None
        outputs = [(m.output, _reason(m), isinstance(m.stop_reason, str)) for m in members]

        def line() -> trace.Ended:
            chain = chains.pop(live.number)
            return trace.Ended(
                step=step,
                at_us=at_us,
                request=live.number,
                cached=first.num_shared_tokens + first.num_copied_tokens if first else 0,
                copied=first.num_copied_tokens if first else 0,
                was_admitted=first is not None and first.first_planned_s is not None,
                sequences=tuple(trace.SequenceEnd(chain.continued(o), r, s) for o, r, s in outputs),
            )

        self._put(line)

    @_never_raises
    def on_reset(self, preempted: bool) -> None:
        """Record a reset of the cache."""
        self._put_at(partial(trace.CacheReset, preempted=preempted))

    @_never_raises
    def on_new_epoch(self) -> None:
        """Record that the weights were changed."""
        self._put_at(trace.NewEpoch)

    @_never_raises
    def on_erased(self, tenant: bytes) -> None:
        """Record that a tenant was erased."""
        self._put_at(
            lambda step, at_us: trace.Erased(
                step=step, at_us=at_us, tenant=self._names.salt(tenant)
            )
        )

    @_never_raises
    def on_leased(self, key: PrefixKey, terms: LeaseTerms, lease_id: LeaseId | None) -> None:
        """Record that a lease of a prefix was requested."""
        tokens: array[int] = key.tokens[:]
        self._put_at(
            lambda step, at_us: trace.Leased(
                step=step,
                at_us=at_us,
                lease=lease_id,
                prefix=bytes(self._names.prompt(tokens, key.images).names),
                tenant=self._names.salt(key.identity.tenant),
                head=self._names.public_prefix(key.identity),
                ttl_s=terms.ttl_s,
                refresh_on_hit=terms.refresh_on_hit,
            )
        )

    @_never_raises
    def on_published(self, key: PrefixKey) -> None:
        """Record that publication of a prefix was requested."""
        self._put_at(
            lambda step, at_us: trace.Published(
                step=step,
                at_us=at_us,
                prefix=bytes(self._names.prompt(key.tokens, key.images).names),
                tenant=self._names.salt(key.identity.tenant),
            )
        )

    @_never_raises
    def on_lease_ended(self, lease_id: LeaseId) -> None:
        """Record that a lease ended."""
        self._put_at(partial(trace.LeaseEnded, lease=lease_id))

    @_never_raises
    def _record_stop(self) -> None:
        self._put_at(trace.Stopped)

    @property
    def _at_us(self) -> int:
        return self._now_us - self._start_us

    def _put_at(self, event: Callable[..., trace.AnyEvent]) -> None:
        """Queue an event at the current step and time."""
        self._put(partial(event, step=self._num_steps, at_us=self._at_us))

    def _put(self, line: Callable[[], trace.AnyEvent]) -> None:
        """Queue a line, after the steps that ran before it."""
        assert self._writer is not None
        self._put_steps()
        self._writer.put(line)

    def _put_steps(self) -> None:
        """Queue the times of the steps that ran."""
        assert self._writer is not None
        if self._times:
            times, self._times = tuple(self._times), []
            event = trace.Steps(step=self._num_steps - len(times) // 2, times_us=times)
            self._writer.put(lambda: event)

    def _end(self) -> None:
        """Record nothing from now on."""
        self._writer, self._live = None, {}
        self.clock.unfreeze()


def _reason(sequence: Sequence) -> str:
    return "live" if sequence.finish_reason is None else str(sequence.finish_reason)

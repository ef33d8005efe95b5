"""Replays a recorded run and compares its hits.

The recorded events are applied to the real scheduler and cache, step by step, at the recorded
times. A runner that returns the recorded tokens replaces the model::

    events ──► scheduler.plan ──► recorded tokens ──► scheduler.commit ──► hits

With the recorded settings, what every request finds is the same, to the token: nothing in the
scheduler or the cache depends on which number a token has, only on where two prompts differ.
Other settings change the times as well: ``timed_replay`` simulates those.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import (
    SampledToken,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
)
from ostinato.core.request import FinishReason, Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.lab.traces.recording import Recording
from ostinato.sched.sequence import Sequence, SequenceUpdate
from ostinato.tenants.terms import LeaseId, LeaseTerms
from ostinato.traces import format as trace
from ostinato.traces.anonymizer import unpack_names


@dataclass(frozen=True, slots=True)
class Hits:
    """The hits of a request at its first admission.

    Attributes:
        cached: Prompt tokens that hit, copied ones included.
        copied: Those that were copied out of a block.
    """

    cached: int
    copied: int


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request, recorded and replayed.

    Attributes:
        number: Its number in the recording.
        prompt_tokens: Length of its prompt.
        recorded: Recorded hits; None if not recorded.
        replayed: Replayed hits; None if never admitted.
    """

    number: int
    prompt_tokens: int
    recorded: Hits | None
    replayed: Hits | None

    @property
    def agrees(self) -> bool:
        """Whether both are the same."""
        return self.recorded == self.replayed


class Replay:
    """Replays a recorded run.

    Attributes:
        recording: The recording.
        cache: A real cache with the recorded settings.
        scheduler: A real scheduler.
        num_idle_steps: Recorded steps in which no request had anything to compute in the replay; 0
            unless only a part was recorded.
    """

    def __init__(self, recording: Recording) -> None:
        """Start at the beginning of the recording."""
        self.recording = recording
        self.num_idle_steps = 0
        self._now_s = recording.header.start_us / 1_000_000
        header, clock = recording.header, lambda: self._now_s
        self.cache = build_cache(header.cache, clock, epoch=header.epoch)
        self.scheduler = build_scheduler(header.scheduler, self.cache, clock)
        self._answers = _RecordedAnswers()
        self._ended = recording.ended
        self._leaders: dict[int, Sequence] = {}
        self._leases: dict[int, LeaseId] = {}
        self._watch_plan: Callable[[StepPlan], None] = lambda _plan: None

    def run(
        self, watch_plan: Callable[[StepPlan], None] = lambda _plan: None
    ) -> list[ReplayedRequest]:
        """Replay all recorded events; returns the requests, in order.

        ``watch_plan`` is called with the plan of every recorded step, also if it computes nothing.
        """
        self._watch_plan = watch_plan
        for event in self.recording.events:
            self._do(event)
        return [self._compare(added) for added in self.recording.added]

    def _do(self, event: trace.AnyEvent) -> None:
        """Replay one event."""
        match event:
            case trace.Added():
                self._add(event)
            case trace.Steps():
                times = event.times_us
                for begun, ended in zip(times[::2], times[1::2], strict=True):
                    self._step(begun, ended)
            case trace.Failed():
                self._fail(*event.times_us)
            case _:
                if not isinstance(event, trace.Ended):
                    self._at(event.at_us)
                    self._administer(event)

    def _administer(self, event: trace.AnyEvent) -> None:
        """Replay what happened between steps."""
        admin = self.cache.admin
        match event:
            case trace.Cancelled():
                self._note(self.scheduler.cancel(_name(event.request)))
            case trace.CacheReset():
                if event.preempted:
                    self.scheduler.preempt_all()
                admin.reset()
            case trace.NewEpoch():
                admin.new_epoch()
            case trace.Erased():
                admin.erase(event.tenant.encode())
            case trace.Leased():
                key = self._prefix(event)
                receipt = admin.lease(key, LeaseTerms(event.ttl_s, event.refresh_on_hit))
                if event.lease is not None and receipt.lease_id is not None:
                    self._leases[event.lease] = receipt.lease_id
            case trace.Published():
                admin.publish(self._prefix(event))
            case trace.LeaseEnded():
                if event.lease in self._leases:
                    admin.end_lease(self._leases.pop(event.lease))

    def _prefix(self, event: trace.Leased | trace.Published) -> PrefixKey:
        own = Identity(epoch=self.cache.manager.epoch, tenant=event.tenant.encode())
        return PrefixKey(_after_public(own, event.head), unpack_names(event.prefix))

    def _add(self, event: trace.Added) -> None:
        self._at(event.at_us)
        end = self._ended.get(event.request)
        sequences = () if end is None else end.sequences
        request = _request(event, sequences)
        self.scheduler.add(request, tuple(range(event.n)))
        self._answers.expect(event.n, sequences)

    def _step(self, begun_us: int, ended_us: int) -> None:
        self._at(begun_us)
        plan = self.scheduler.plan()
        self._watch_plan(plan)
        if not plan.sequences:
            self.num_idle_steps += 1
            return
        result = self._answers.execute(plan)
        self._at(ended_us)
        updates = self.scheduler.commit(result)
        for update in updates:
            if self._answers.reached_its_stop_string(update):
                self.scheduler.finish(update.sequence, FinishReason.STOP, "a stop string")
        self._note([update.sequence for update in updates])

    def _fail(self, begun_us: int, ended_us: int) -> None:
        """Fail a step as recorded; the engine also ends the forks of its sequences."""
        self._at(begun_us)
        self.scheduler.plan()
        self._at(ended_us)
        ended = [update.sequence for update in self.scheduler.fail()]
        self._note(ended)
        for request_id in dict.fromkeys(s.request.request_id for s in ended):
            self._note(self.scheduler.cancel(request_id))

    def _at(self, at_us: int) -> None:
        """Set the clock."""
        self._now_s = (self.recording.header.start_us + at_us) / 1_000_000

    def _note(self, sequences: list[Sequence]) -> None:
        """Keep the first sequence of each request: it has the request's hits."""
        for sequence in sequences:
            if sequence.index == 0:
                self._leaders[int(sequence.request.request_id)] = sequence

    def _compare(self, added: trace.Added) -> ReplayedRequest:
        end, leader = self._ended.get(added.request), self._leaders.get(added.request)
        recorded = replayed = None
        if end is not None and end.was_admitted:
            recorded = Hits(end.cached, end.copied)
        if leader is not None and leader.first_planned_s is not None:
            shared, copied = leader.num_shared_tokens, leader.num_copied_tokens
            replayed = Hits(shared + copied, copied)
        prompt_tokens = len(unpack_names(added.prompt))
        return ReplayedRequest(added.request, prompt_tokens, recorded, replayed)


class _RecordedAnswers:
    """Answers a plan with the recorded tokens."""

    def __init__(self) -> None:
        self._next_id = 0
        self._outputs: dict[SequenceId, tuple[array[int], trace.SequenceEnd]] = {}

    def expect(self, n: int, sequences: tuple[trace.SequenceEnd, ...]) -> None:
        """Add the answers of a request that was just added: sequences are numbered in order."""
        for index, sequence in enumerate(sequences):
            number = SequenceId(self._next_id + index)
            self._outputs[number] = (unpack_names(sequence.output), sequence)
        self._next_id += n

    def execute(self, plan: StepPlan) -> StepResult:
        """Answer every sequence of a plan."""
        return StepResult(tuple(map(self._answer, plan.sequences)))

    def _answer(self, scheduled: ScheduledSequence) -> SequenceResult:
        logprobs = ((),) * len(scheduled.prompt_targets)
        if scheduled.sample is None:
            return SequenceResult((), logprobs)
        place, seeds = len(scheduled.sample.output), scheduled.sample.seeds
        # A prefill samples for all continuations of a prompt, later steps for one of them.
        numbers = [SequenceId(scheduled.sequence_id + index) for index in range(len(seeds))]
        return SequenceResult(tuple(self._token(number, place) for number in numbers), logprobs)

    def _token(self, number: SequenceId, place: int) -> SampledToken:
        """Return the recorded token; after the last one, an unknown one or the recorded error."""
        output, end = self._outputs.get(number, (array("I"), trace.SequenceEnd(b"", "live")))
        if place < len(output):
            return SampledToken(output[place])
        error = "nothing could be sampled" if end.reason == FinishReason.ERROR else ""
        return SampledToken(_unknown_token(number, place), error=error)

    def reached_its_stop_string(self, update: SequenceUpdate) -> bool:
        """Whether the engine ended this sequence after the step."""
        sequence = update.sequence
        known = self._outputs.get(sequence.sequence_id)
        if known is None or sequence.finish_reason is not None:
            return False
        output, end = known
        return end.by_string and sequence.num_output_tokens >= len(output)


def _request(event: trace.Added, sequences: tuple[trace.SequenceEnd, ...]) -> Request:
    """Return a request that ends where the recorded one did."""
    stops = {
        unpack_names(end.output)[-1]
        for end in sequences
        if end.reason == FinishReason.STOP and not end.by_string and end.output
    }
    return Request(
        _name(event.request),
        unpack_names(event.prompt),
        SamplingParams(
            n=event.n,
            max_tokens=event.max_tokens,
            stop_token_ids=tuple(stops),
            prompt_logprobs=0 if event.prompt_logprobs else None,
            prompt_logprob_start=event.prompt_logprob_start,
        ),
        identity=_identity(event),
        images=tuple(ImageSpan(i.name.encode(), i.start, i.length) for i in event.images),
        priority=event.priority,
        cache_read=event.cache_read,
        cache_write=event.cache_write,
    )


def _identity(event: trace.Added) -> Identity:
    adapter, start = event.adapter.encode(), event.adapter_start
    own = Identity(
        epoch=event.epoch, adapter=b"" if start else adapter, tenant=event.tenant.encode()
    )
    own = _after_public(own, event.head)
    return replace(own, adapter=adapter, base=own, start=start) if start else own


def _after_public(own: Identity, head: tuple[str, int] | None) -> Identity:
    """Return the identity of a sequence that begins with the public prefix of a trace, if any."""
    if head is None:
        return own
    return replace(own, base=replace(own, tenant=head[0].encode()), start=head[1])


def _name(number: int) -> RequestId:
    return RequestId(str(number))


def _unknown_token(number: int, place: int) -> int:
    """Return a token that stands for one that was not recorded."""
    return hash((number, place)) & 0xFFFFFFFF

"""A scheduler small enough to draw: letters as tokens, a step as text.

::

    tiny = tiny_scheduler(num_blocks=8, budget=6)
    tiny.add("first", "ABCDEFGH", max_tokens=2)
    tiny.add("other", "ABCDxy")
    tiny.step()      # "first:ABCDEF"
    tiny.step()      # "first:GH other:....xy"      four tokens of "other" hit
    tiny.outputs     # {"first": "a", "other": "a"}

A dot stands for a token that hit in a whole block, a comma for one that was copied out of a
block. The second continuation of a request is drawn as ``"name/1"``. Behind the scenes runs the
fake runner, and ``StepChecks`` looks at every step.
"""

from array import array
from typing import Any

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.core.request import FinishReason, Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.sched.sequence import Sequence, SequenceUpdate
from ostinato.settings import IndexName, PrefixCacheConfig
from tests.support.cache.fake_runner import FakeRunner, ForwardPassFailed, Sampler, count_letters
from tests.support.cache.step_checks import StepChecks

MANY_STEPS = 1000
"""More than any figure needs; a run that gets here would never end."""


def tiny_scheduler(
    num_blocks: int = 16,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int | None = None,
    index: IndexName = "radix",
    sample: Sampler = count_letters,
    **settings: Any,
) -> "TinyScheduler":
    """Return a scheduler without requests; ``settings`` are those of either config."""
    for_scheduler = ("max_chunk_tokens", "max_step_ms", "max_model_len", "order", "max_overtakes")
    chosen = {name: settings.pop(name) for name in for_scheduler if name in settings}
    cache = PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size, index=index, **settings)
    seats = min(8, budget) if max_num_seqs is None else max_num_seqs
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seats, **chosen)
    return TinyScheduler(config, cache, sample)


def make_request(
    name: str,
    prompt: str,
    *,
    tenant: str = "",
    images: tuple[ImageSpan, ...] = (),
    priority: int = 0,
    cache_read: bool = True,
    cache_write: bool = True,
    eos: str = "",
    stop: str = "",
    max_tokens: int | None = 1,
    **params: Any,
) -> Request:
    """Return a request, a letter per token.

    Args:
        name: Its id.
        prompt: Its tokens.
        tenant: Whose it is.
        images: Among its tokens.
        priority: Lower goes first.
        cache_read: Whether it may hit.
        cache_write: Whether others may hit what it computes.
        eos: Letters that end it as the model's end of sequence.
        stop: Letters that end it as its own stop ids.
        max_tokens: Most letters of the answer; one is enough to see a prompt computed.
        **params: Other ``SamplingParams``.
    """
    return Request(
        RequestId(name),
        array("I", map(ord, prompt)),
        SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(map(ord, stop)), **params),
        identity=Identity(tenant=tenant.encode()),
        images=images,
        priority=priority,
        cache_read=cache_read,
        cache_write=cache_write,
        eos_token_ids=frozenset(map(ord, eos)),
    )


def make_sequence(number: int, prompt: str = "ABC", **options: Any) -> Sequence:
    """Return a new sequence of a request as of ``make_request``."""
    request = make_request(f"request {number}", prompt, **options)
    key = PrefixKey(request.identity, request.prompt_token_ids, request.images)
    return Sequence(SequenceId(number), request, 0, key, seed=0)


class TinyScheduler:
    """A scheduler, its cache, a fake runner, and what came of every request.

    Attributes:
        outputs: Answer so far by name, ended or not.
        reasons: Why those that ended did.
        sequences: Every sequence that was ever planned or got a token, by name.
        plan: The last plan.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCacheConfig,
        sample: Sampler,
        checks: type[StepChecks] = StepChecks,
    ) -> None:
        """Make a scheduler whose clock shows the number of steps so far."""
        self.num_steps = 0

        def clock() -> float:
            return float(self.num_steps)

        self.cache = build_cache(cache, clock)
        self.scheduler = build_scheduler(config, self.cache, clock)
        self.runner = FakeRunner(cache, sample)
        self.checks = checks(self.scheduler, self.cache, self.runner, clock)
        self.outputs: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.sequences: dict[str, Sequence] = {}
        self.plan = StepPlan(())
        self._names: dict[SequenceId, str] = {}

    # --- what may be asked ---

    def add(self, name: str, prompt: str, seeds: tuple[int, ...] | None = None, **how: Any) -> None:
        """Take a request; takes what ``make_request`` takes. Seeds are 0, 1, ... by default."""
        self.add_request(make_request(name, prompt, **how), seeds)

    def add_request(self, request: Request, seeds: tuple[int, ...] | None = None) -> None:
        """Take a request that was made."""
        seeds = tuple(range(request.params.n)) if seeds is None else seeds
        self.scheduler.add(request, seeds)
        first = len(self._names)
        for index in range(request.params.n):
            name = request.request_id if index == 0 else f"{request.request_id}/{index}"
            self._names[SequenceId(first + index)] = name
        self.runner.expect(SequenceId(first), request, seeds)
        self.checks.know(request)

    def adopt(self) -> None:
        """Learn the live requests that other code has added to the scheduler itself."""
        for sequence in self.checks.live():
            if sequence.sequence_id not in self._names:
                self._names[sequence.sequence_id] = sequence.request.request_id
                self.runner.expect(sequence.sequence_id, sequence.request, (sequence.seed,))
                self.checks.know(sequence.request)

    def step(self) -> str:
        """Run one step.

        Returns:
            What every sequence computed, in the order of the plan; empty if none is live.
        """
        self.checks.before_plan()
        self.plan = self.scheduler.plan()
        self.checks.after_plan(self.plan)
        self.sequences |= {self._names[s.sequence_id]: s for s in self.checks.live()}
        if not self.plan.sequences:
            return ""
        picture = " ".join(map(self._draw, self.plan.sequences))
        self.num_steps += 1
        try:
            result = self.runner.execute(self.plan)
        except ForwardPassFailed:
            updates = self.scheduler.fail()
        else:
            updates = self.scheduler.commit(result)
            self.checks.count(self.plan)
        for update in updates:
            self._take(update)
        self.checks.after_step()
        return picture

    def failing_step(self) -> str:
        """Run one step whose forward pass raises."""
        self.runner.fail_next()
        return self.step()

    def serve(self, name: str, prompt: str, **options: Any) -> None:
        """Add a request as ``add``, and run until no request is live."""
        self.add(name, prompt, **options)
        self.run()

    def run(self, most: int = MANY_STEPS) -> list[str]:
        """Run until no request is live.

        Raises:
            AssertionError: One still is after so many steps.
        """
        steps = []
        while self.scheduler.has_work:
            assert len(steps) < most, f"still alive after {most} steps: {self.checks.live()}"
            steps.append(self.step())
        self.checks.nothing_runs()
        return steps

    def cancel(self, name: str) -> list[str]:
        """End a request between steps; return the names of the continuations that ended."""
        ended = self.scheduler.cancel(RequestId(name))
        for sequence in ended:
            self._end(sequence)
        self.checks.between_steps()
        return [self._names[sequence.sequence_id] for sequence in ended]

    def fail_to_sample(self, name: str) -> None:
        """Let nothing be sampled from a sequence's next row."""
        number = next(number for number, known in self._names.items() if known == name)
        self.runner.cannot_sample(number)

    def stop(self, name: str, string: str) -> None:
        """End one continuation between steps, at a stop string."""
        sequence = self.sequences[name]
        self.scheduler.finish(sequence, FinishReason.STOP, string)
        self._end(sequence)
        self.checks.between_steps()

    def preempt_all(self) -> None:
        """Send everybody back to the queue."""
        self.scheduler.preempt_all()
        self.checks.between_steps()

    def reset(self) -> None:
        """Preempt everybody and forget every prefix."""
        self.preempt_all()
        self.cache.admin.reset()
        self.checks.between_steps()

    # --- what can be seen ---

    @property
    def state(self) -> str:
        """Return who runs and who waits, each by rank: ``"first other | third"``."""
        running = [self._name(s) for s in self.checks.live() if s.table is not None]
        waiting = [self._name(s) for s in self.checks.live() if s.table is None]
        return f"{' '.join(running)} | {' '.join(waiting)}".strip()

    def hits(self, name: str) -> tuple[int, int]:
        """Return the tokens that a sequence shared and copied when it was first admitted."""
        sequence = self.sequences[name]
        return sequence.num_shared_tokens, sequence.num_copied_tokens

    # --- small print ---

    def _take(self, update: SequenceUpdate) -> None:
        sequence = update.sequence
        self.sequences[self._name(sequence)] = sequence
        if update.token is not None and not update.token.error:
            letter = chr(update.token.token_id)
            self.outputs[self._name(sequence)] = self.outputs.get(self._name(sequence), "") + letter
        assert update.token or sequence.finish_reason, "an update that says nothing"
        if sequence.finish_reason is not None:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        name = self._name(sequence)
        assert name not in self.reasons, f"{name} ended twice"
        assert sequence.finish_reason is not None and sequence.table is None
        assert "".join(map(chr, sequence.output)) == self.outputs.get(name, ""), "lost a token"
        self.reasons[name] = str(sequence.finish_reason)
        self.runner.forget(sequence.sequence_id)
        self.checks.forget(sequence)

    def _name(self, sequence: Sequence) -> str:
        """Name a sequence by its number, and see that request and index agree."""
        name = self._names[sequence.sequence_id]
        index = f"/{sequence.index}" if sequence.index else ""
        assert name == f"{sequence.request.request_id}{index}", "a number that is another's"
        return name

    def _draw(self, scheduled: ScheduledSequence) -> str:
        name, text = self._names[scheduled.sequence_id], "".join(map(chr, scheduled.tokens))
        sequence = self.sequences[name]
        if sequence in self.checks.admitted:
            assert sequence.table is not None
            hits = "." * sequence.table.num_shared_tokens + "," * sequence.table.num_copied_tokens
            text = hits + text
        return f"{name}:{text}"

"""Laws of long prompts: a share of every step, a bound on steps, and steps within their time.

A state machine draws traffic. What a step must compute is derived from ranks and lengths alone, by
the words of ``shortest_first``, not by its code.
"""

from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ostinato.core.ids import RequestId
from ostinato.sched.sequence import Sequence
from ostinato.scheduling.step_prices import StepPrices
from tests.support.cache.timed_scheduler import PRICES, TimedScheduler

SHARE = 0.25
SEATS = 4
DEEP_PRICES = StepPrices(0.040, 0.002, 2e-5, free_tokens=4)
"""Behind 100 tokens the attention of a token costs as much as the rest of it."""

LENGTHS = st.one_of(st.integers(1, 8), st.integers(40, 90), st.integers(100, 300))


@dataclass
class Promise:
    """What a prompt may take at most, once it is admitted."""

    sequence: Sequence
    elders: dict[int, int]  # tokens left by sequence id, of those that came before, and its own
    num_steps: int = 0
    share_tokens: int = 10**6  # the smallest share so far

    @property
    def most_steps(self) -> int:
        """Steps in which it is computed: the last of each elder's may be filled in part."""
        return sum(-(-left // self.share_tokens) for left in self.elders.values())


class LongPrompts(RuleBasedStateMachine):
    """Prompts of all lengths come, go on, and are cancelled."""

    @initialize(
        budget=st.integers(6, 32),
        max_step_ms=st.sampled_from([None, 250, 400]),
        max_chunk_tokens=st.sampled_from([None, None, 5]),
        prices=st.sampled_from([PRICES, DEEP_PRICES]),
    )
    def begin(
        self, budget: int, max_step_ms: int | None, max_chunk_tokens: int | None, prices: StepPrices
    ) -> None:
        self.budget = budget if max_step_ms is None else 2_048
        self.max_chunk, self.max_step_ms, self.true = max_chunk_tokens, max_step_ms, prices
        self.timed = TimedScheduler(
            true_prices=prices,
            max_num_batched_tokens=self.budget,
            max_chunk_tokens=max_chunk_tokens,
            max_num_seqs=SEATS,
            max_step_ms=max_step_ms,
            max_overtakes=3,
        )
        self.promises: dict[int, Promise] = {}
        self.num_added = 0

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=3), max_tokens=st.integers(1, 6))
    def arrive(self, lengths: list[int], max_tokens: int) -> None:
        for num_tokens in lengths:
            self.timed.add(f"{self.num_added}", num_tokens, max_tokens)
            self.num_added += 1

    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        self.timed.scheduler.cancel(RequestId(f"{number}"))

    @precondition(lambda self: self.timed.scheduler.has_work)
    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.timed.scheduler.has_work:
                self._step()

    def teardown(self) -> None:
        """Whatever came is served at last."""
        for _ in range(3_000):
            if not hasattr(self, "timed") or not self.timed.scheduler.has_work:
                return
            self._step()
        raise AssertionError("a request is never served")

    def _step(self) -> None:
        live = self._live()
        left = {s.sequence_id: s.num_uncomputed for s in live}
        starts = {s.sequence_id: s.num_computed for s in live}
        prompts = [s for s in live if s.table is not None and s.num_uncomputed > 1]
        decodes = [s for s in live if s.table is not None and s.num_uncomputed == 1]
        names = {s.sequence_id: str(s.request.request_id) for s in live}
        computed = self.timed.step()
        if prompts:
            elder = prompts[0]
            elders = [s.sequence_id for s in live if s.rank <= elder.rank and s not in decodes]
            num_computed = sum(computed.get(names[number], 0) for number in elders)
            share = self._share_tokens(len(decodes))
            if self.max_step_ms is None:
                assert num_computed >= min(share, *(left[number] for number in elders), 10**6)
            elif len(elders) == 1:
                self._check_time(
                    starts[elder.sequence_id], left[elder.sequence_id], num_computed, decodes
                )
            for promise in self.promises.values():
                promise.share_tokens = min(promise.share_tokens, share)
        self._check_length()
        self._keep_promises()

    def _check_time(
        self, start: int, left: int, num_computed: int, decodes: list[Sequence]
    ) -> None:
        """The elder computes what a quarter of the time suffices for, or all of its tokens."""
        keys = sum(len(s.key) for s in decodes)
        decodes_s = self.true.fixed_s + keys * self.true.pair_s
        share_s = SHARE * ((self.max_step_ms or 0) / 1000 - decodes_s)
        enough = min(left, self.max_chunk or left)
        assert num_computed >= enough or self.true.prompt_s(start, num_computed + 1) >= share_s

    def _check_length(self) -> None:
        """A step takes its time, and that of a token more for each that must go on."""
        if self.max_step_ms is not None:
            longest = max(s.end for s in self.timed.plan.sequences)
            slack_s = 2 * self.true.prompt_s(longest, 1)
            assert self.timed.took_s <= self.timed.limit_s + slack_s

    def _keep_promises(self) -> None:
        """Count the steps of prompts in tokens' terms, and make a promise to new ones."""
        live = {s.sequence_id: s for s in self._live()}
        for number, promise in list(self.promises.items()):
            promise.num_steps += 1
            is_done = number not in live or promise.sequence.num_output_tokens > 0
            if is_done:
                del self.promises[number]
            elif self.max_step_ms is None:
                assert promise.num_steps < promise.most_steps, "later prompts delay it"
        for number, sequence in live.items():
            is_prompt = sequence.table is not None and sequence.num_uncomputed > 1
            if is_prompt and number not in self.promises:
                elders = {
                    s.sequence_id: s.num_uncomputed
                    for s in live.values()
                    if s.rank <= sequence.rank and s.num_uncomputed > 1
                }
                share = self._share_tokens(SEATS - 1)
                self.promises[number] = Promise(sequence, elders, share_tokens=share)

    def _share_tokens(self, num_decodes: int) -> int:
        share = max(1, int((self.budget - num_decodes) * SHARE))
        return min(share, self.max_chunk or share)

    def _live(self) -> list[Sequence]:
        families = self.timed.scheduler.requests.live.values()
        return sorted((s for family in families for s in family), key=lambda s: s.rank)


TestLongPrompts = LongPrompts.TestCase
TestLongPrompts.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink one takes minutes
)

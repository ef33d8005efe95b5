"""Models with states: what is computed again when prompts share a prefix.

A checkpoint is far too large to be kept at every block, so a hit may end before the prefix does.
These are the scenes in which other engines hit nothing: prompts that part at a multiple of the
block or not, suffixes of any length, short prompts, identical prompts, and chats. Blocks of 16
tokens, states at multiples of 64; the runner keeps of a state which tokens went into it.
"""

import random
from array import array

import pytest

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.settings import PrefixCacheConfig, StateConfig

UNIT = 64


class StateServer:
    """A scheduler over states that are digests of the tokens that went into them.

    Attributes:
        num_computed: Tokens that each request's sequences computed, by name.
    """

    def __init__(
        self, index: str, num_states: int = 400, num_blocks: int = 4096, **states: int
    ) -> None:
        """Start with an empty cache and steps of 2,048 tokens."""
        config = StateConfig(num_states, UNIT, **states)
        caching = PrefixCacheConfig(num_blocks, 16, index=index, states=config)
        self.cache = build_cache(caching, lambda: 0.0)
        scheduling = SchedulerConfig(2048, max_num_seqs=64)
        self.scheduler = build_scheduler(scheduling, self.cache)
        self.num_computed: dict[str, int] = {}
        self._states = [0] * num_states
        self._tokens: dict[SequenceId, tuple[str, array]] = {}
        self._num_sequences = 0

    def send(self, name: str, prompt: list[int], max_tokens: int = 1, n: int = 1) -> None:
        """Add a request; its answer is 7, 7, 7, ..."""
        tokens = array("I", prompt)
        params = SamplingParams(max_tokens=max_tokens, n=n)
        self.scheduler.add(Request(RequestId(name), tokens, params), tuple(range(n)))
        for number in range(n):
            self._tokens[SequenceId(self._num_sequences + number)] = name, tokens[:]
        self._num_sequences += n
        self.num_computed[name] = 0

    def run(self) -> None:
        """Serve all to their ends."""
        while self.scheduler.has_work:
            self.step()
        self.cache.check()
        assert self.cache.manager.num_live_tables == 0

    def step(self) -> None:
        """Run one step."""
        plan = self.scheduler.plan()
        self._execute(plan)
        self.scheduler.commit(self._answer(plan))

    def serve(self, name: str, prompt: list[int], **how: int) -> int:
        """Serve one request alone; return how many tokens it computed."""
        self.send(name, prompt, **how)
        self.run()
        return self.num_computed[name]

    def _execute(self, plan: StepPlan) -> None:
        for copy in plan.state_loads:
            self._states[copy.target] = 0 if copy.source is None else self._states[copy.source]
        for scheduled in plan.sequences:
            name, tokens = self._tokens[scheduled.sequence_id]
            assert self._states[scheduled.state_slot] == _digest(tokens, scheduled.start), name
            tokens[scheduled.start :] = scheduled.tokens
            self._states[scheduled.state_slot] = _digest(tokens, scheduled.end)
            self.num_computed[name] += len(scheduled.tokens)
            ends_on_the_grid = scheduled.end % UNIT == 0
            assert scheduled.sample is not None or ends_on_the_grid, "cut beside the grid"
        for copy in plan.state_saves:
            self._states[copy.target] = self._states[copy.source]

    def _answer(self, plan: StepPlan) -> StepResult:
        results = []
        for scheduled in plan.sequences:
            seeds = () if scheduled.sample is None else scheduled.sample.seeds
            for number in range(1, len(seeds)):
                twin = self._tokens[scheduled.sequence_id][1][:]
                name = self._tokens[scheduled.sequence_id][0]
                self._tokens[SequenceId(scheduled.sequence_id + number)] = name, twin
            for number in range(len(seeds)):
                self._tokens[SequenceId(scheduled.sequence_id + number)][1].append(7 + number)
            results.append(SequenceResult(tuple(SampledToken(7 + i) for i in range(len(seeds)))))
        return StepResult(tuple(results))


def _digest(tokens: array, end: int) -> int:
    return hash(tokens[:end].tobytes()) if end else 0


def draw(seed: int, num_tokens: int) -> list[int]:
    """Return token ids of its own."""
    rng = random.Random(seed)
    return [rng.randrange(10, 50_000) for _ in range(num_tokens)]


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700), (400, 100), (130, 40)])
def test_of_64_prompts_sent_at_once_only_the_first_computes_what_they_share(index, shared, own):
    """The first one's prefill is cut where the others part, and they wait for its state."""
    server, prefix = StateServer(index), draw(1, shared)
    for number in range(64):
        server.send(str(number), prefix + draw(100 + number, own))
    server.run()
    assert server.num_computed.pop("0") == shared + own
    assert max(server.num_computed.values()) <= own + UNIT


@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700)])
def test_of_prompts_one_after_the_other_the_second_leaves_the_state_where_they_part(
    index, shared, own
):
    """Nobody knew where to cut when the first was computed: the second pays, once."""
    server, prefix = StateServer(index), draw(1, shared)
    computed = [server.serve(str(i), prefix + draw(100 + i, own)) for i in range(8)]
    assert computed[0] == shared + own
    assert computed[1] < shared + own, "it began at a checkpoint between"
    assert max(computed[2:]) <= own + UNIT


@pytest.mark.parametrize("suffix", [40, 376, 2000])
def test_a_suffix_of_any_length_hits(index, suffix):
    server, prefix = StateServer(index), draw(1, 3000)
    assert server.serve("first", prefix) == 3000
    again = server.serve("again", prefix + draw(2, suffix))
    assert again <= suffix + UNIT


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 500, 2200])
def test_an_identical_prompt_computes_at_most_64_tokens(index, num_tokens):
    server, prompt = StateServer(index), draw(1, num_tokens)
    assert server.serve("first", prompt) == num_tokens
    assert server.serve("again", prompt) <= UNIT


def test_each_turn_of_a_chat_computes_its_own_tokens_and_at_most_64_more(index):
    server, rng, text = StateServer(index), random.Random(3), draw(1, 700)
    known = 0
    for turn in range(20):
        answer = rng.randrange(1, 90)
        computed = server.serve(str(turn), text, max_tokens=answer)
        own = len(text) - known + answer - 1  # the last sampled token is not computed
        assert computed <= own + (UNIT if turn else 0), f"turn {turn}"
        text = text + [7] * answer
        known = len(text)
        text = text + draw(10 + turn, rng.randrange(5, 300))


def test_forks_continue_their_parents_state(index):
    server, prompt = StateServer(index), draw(1, 200)
    assert server.serve("four", prompt, n=4, max_tokens=80) == 200 + 4 * 79


def test_a_preempted_sequence_returns_to_its_last_64_tokens(index):
    server, prompt = StateServer(index), draw(1, 200)
    server.send("one", prompt, max_tokens=130)
    for _ in range(100):
        server.step()
    before = server.num_computed["one"]
    server.scheduler.preempt_all()
    server.run()
    assert server.num_computed["one"] - before <= 30 + 1 + UNIT
    server.cache.check()


def test_a_checkpoint_goes_with_the_block_that_it_ends_in(index):
    """Without keys and values before it, it could never hit."""
    server = StateServer(index, num_blocks=512)
    for number in range(6):
        server.serve(str(number), draw(number, 2200))
    states = server.cache.states
    assert states is not None and states.stats.num_evicted > 0
    newest = PrefixKey(Identity(), draw(5, 2200))
    assert server.cache.manager.match(newest).num_tokens == 2176


def test_with_two_slots_every_request_ends(index):
    """One runs, and what it hit is held meanwhile; checkpoints make room for runners."""
    server, prefix = StateServer(index, num_states=2), draw(1, 200)
    for number in range(4):
        server.send(str(number), prefix + draw(number, 30), max_tokens=70)
    server.run()


def test_what_is_computed_again_is_not_kept_twice(index):
    server, prefix = StateServer(index, sparse_checkpoints=0), draw(1, 1600)
    server.serve("first", prefix + draw(2, 600))
    server.serve("second", prefix + draw(3, 600))
    held = [entry for run in server.cache.manager.index.runs() for entry in run.entries]
    assert sum(entry.num_blocks for entry in held) == (1600 + 600 + 600) // 16 - 1
    states = server.cache.states
    assert states is not None and states.stats.num_again_tokens == 1600


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_num_batched_tokens": 64, "max_num_seqs": 8},
            "leaves 57 tokens",
        ),
        ({"max_num_seqs": 8, "max_chunk_tokens": 32}, r"max_chunk_tokens=32.*at least 64"),
    ],
)
def test_steps_without_room_for_a_chunk_are_refused(index, settings, message):
    cache = build_cache(PrefixCacheConfig(64, 16, index=index, states=StateConfig(4)))
    with pytest.raises(ConfigError, match=message):
        build_scheduler(SchedulerConfig(**settings), cache)

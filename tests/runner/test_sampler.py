"""The sampler follows its parameters.

The oracle is ``sampling_reference``: one row at a time, in plain Python. Rows in float64 are
sampled in torch; ``native/test_sampling`` compares the library with its own definition.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.core.plan import SampleTask
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.sampler import Sampler
from tests.runner.sampling_reference import TooClose, distribution, inverse_cdf, task
from tests.support.instruction_sets import needs_library

VOCAB = 7
MORE_SEEDS = tuple(range(30))

# A grid of few values, so that ties are common.
logit = st.integers(-12, 12).map(lambda step: step / 4)
row = st.lists(logit, min_size=VOCAB, max_size=VOCAB)
token = st.integers(0, VOCAB - 1)


@st.composite
def tasks(draw: st.DrawFn) -> SampleTask:
    """Any combination of what can be asked for; at least one token is left over."""
    return task(
        prompt=draw(st.lists(token, min_size=1, max_size=6)),
        output=draw(st.lists(token, max_size=6)),
        banned=draw(st.lists(st.integers(0, 2**32 - 1) | token, max_size=VOCAB - 1)),
        seeds=draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5)),
        temperature=draw(st.sampled_from([1.0, 0.3, 2.5, 0.0])),
        top_k=draw(st.sampled_from([0, 2, 3, 5, 1, VOCAB, VOCAB + 1])),
        top_p=draw(st.sampled_from([1.0, 0.71, 0.39, 0.97, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.09, 0.6, 1.0])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0, 100.0]))),
        presence_penalty=draw(st.sampled_from([0.0, 0.75, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.25])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
    )


def sample(logits: Sequence[Sequence[float]], jobs: Sequence[SampleTask]) -> list[list[int]]:
    """Token ids by row and seed, from float64 logits."""
    results = Sampler().sample(torch.tensor(logits, dtype=torch.float64), jobs)
    return [[sampled.token_id for sampled in result] for result in results]


def expected(logits: Sequence[float], job: SampleTask) -> list[int]:
    """What the reference draws, one id per seed."""
    probabilities = distribution(logits, job)
    return [inverse_cdf(probabilities, uniform(seed, len(job.output))) for seed in job.seeds]


@given(st.lists(st.tuples(row, tasks()), min_size=1, max_size=6))
def test_each_row_gets_what_the_reference_draws(batch: list[tuple[list[float], SampleTask]]):
    """Penalties, bias, bans, temperature and truncations, all mixed in one batch."""
    batch = [(logits, replace(job, seeds=job.seeds + MORE_SEEDS)) for logits, job in batch]
    try:
        wanted = [expected(logits, job) for logits, job in batch]
    except TooClose:
        assume(False)

    assert sample([logits for logits, _ in batch], [job for _, job in batch]) == wanted


@given(st.lists(st.tuples(row, tasks()), min_size=2, max_size=6))
def test_strangers_in_the_batch_change_nothing(batch: list[tuple[list[float], SampleTask]]):
    """Each row alone, all together, and all in reverse: the same tokens."""
    rows, jobs = [logits for logits, _ in batch], [job for _, job in batch]

    together = sample(rows, jobs)

    assert together == [sample([logits], [job])[0] for logits, job in batch]
    assert together == sample(rows[::-1], jobs[::-1])[::-1]


def test_many_draws_follow_the_distribution():
    """20,000 fixed seeds over eight tokens; chi-square stays below its 99.9 % point."""
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    job = task(seeds=range(20_000), temperature=0.8)

    counts = Counter(sample([logits], [job])[0])

    means = [20_000 * probability for probability in distribution(logits, job)]
    statistic = sum((counts[i] - mean) ** 2 / mean for i, mean in enumerate(means))
    assert statistic < 24.32  # 7 degrees of freedom


def test_the_same_seed_goes_on_with_other_numbers_at_each_position():
    """Otherwise a uniform model would say one token for ever."""
    flat = [[0.0] * 1000] * 50
    steps = [task(output=[0] * position, seeds=[7]) for position in range(50)]

    assert len({ids[0] for ids in sample(flat, steps)}) > 40


def test_top_p_at_the_exact_mass_keeps_no_token_beyond_it():
    """Two of four equal tokens are half of the mass, so a third one adds nothing."""
    [ids] = sample([[5.0, 5.0, 5.0, 5.0]], [task(top_p=0.5, seeds=range(200))])

    assert set(ids) == {0, 1}


@pytest.mark.parametrize(("number", "drawn"), [(0.0, 1), (1 - 2**-53, 5)])
def test_the_extreme_random_numbers_draw_tokens_that_have_mass(
    number: float, drawn: int, monkeypatch: pytest.MonkeyPatch
):
    """Banned tokens stand at both ends, also where sums have more bits than a float64."""
    monkeypatch.setattr("ostinato.runner.sampling.sampler.uniform", lambda seed, position: number)
    rows = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))

    results = sample(rows.tolist(), [task(banned=[0, 6])] * 200)

    assert results == [[drawn]] * 200


def test_a_tiny_temperature_is_as_good_as_greedy():
    """Nothing overflows on the way."""
    assert sample([[1.0, 1.1, -50.0]], [task(temperature=1e-300, seeds=range(9))]) == [[1] * 9]


def test_a_huge_temperature_leaves_the_order_of_tokens_alone():
    """All weights round to the same, yet top_k still knows which are likelier."""
    [ids] = sample([[0.0, 1.0, 2.0]], [task(temperature=1e300, top_k=2, seeds=range(50))])

    assert set(ids) == {1, 2}


def test_half_precision_logits_are_edited_in_full_precision():
    """A bias of 0.01 is lost when added to 100 in bfloat16."""
    logits = torch.tensor([[100.0, 100.0]], dtype=torch.bfloat16)
    job = task(temperature=0.0, logit_bias={1: 0.01})

    assert Sampler().sample(logits, [job])[0][0].token_id == 1


def test_the_raw_logits_and_the_texts_are_left_as_they_were():
    """The scheduler appends to the arrays afterwards; a view held back would forbid it."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    job = task(output=[2], banned=[1], logit_bias={0: 5.0}, repetition_penalty=2.0, top_k=1)

    Sampler().sample(logits, [job])
    job.output.append(1)
    job.prompt.append(1)

    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_an_empty_batch_gives_an_empty_answer():
    assert Sampler().sample(torch.zeros(0, 5), []) == []


def test_a_bias_outside_the_vocabulary_is_our_own_mistake():
    """Admission has the request to blame; here it would be too late."""
    with pytest.raises(AssertionError, match="admission"):
        sample([[0.0, 0.0]], [task(logit_bias={2: 1.0})])


def test_banned_and_seen_ids_outside_the_vocabulary_are_of_no_account():
    """They can never be sampled; a stop id of another model is common in configs."""
    job = task(temperature=0.0, prompt=[9, 0], banned=[4_000_000_000], repetition_penalty=2.0)

    assert sample([[1.0, 0.9]], [job]) == [[1]]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 1}])
@pytest.mark.parametrize(
    ("logits", "wishes", "cause"),
    [
        ([1.0, math.nan], {}, "NaN"),
        ([1.0, math.inf], {}, r"\+inf"),
        ([-math.inf, -math.inf], {}, "-inf for every token"),
        ([1.0, 2.0], {"banned": [0, 1], "min_tokens": 3}, "min_tokens=3 bans 2 ids"),
        ([1.0, 2.0], {"repetition_penalty": 1e-45}, "repetition_penalty=1e-45"),
    ],
)
def test_a_row_without_a_token_is_refused_with_its_cause(logits, wishes, cause, how):
    """Garbage would look like text; the error names what to change; the other row is sampled."""
    batch = torch.tensor([[0.0, 0.0], logits])
    jobs = [task(), task(prompt=[1], **wishes, **how)]

    (good,), (bad,) = Sampler().sample(batch, jobs)

    assert (good.token_id, good.error) == (0, "")
    assert re.search(f"no token can be sampled: .*{cause}", bad.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_broken_row_that_asks_for_logprobs_fails_alone(dtype: torch.dtype):
    """Also where a ban hides the NaN from the draw."""
    logits = torch.tensor([[0.0, 1.0], [0.0, math.nan], [0.0, math.nan]], dtype=dtype)
    jobs = [task(temperature=0.0, logprobs=1, banned=banned) for banned in ([], [], [1])]

    (good,), *broken = Sampler().sample(logits, jobs)

    assert (good.token_id, good.error, len(good.logprobs)) == (1, "", 2)
    assert all("NaN" in sampled.error and not sampled.logprobs for (sampled,) in broken)


class Operations(TorchDispatchMode):
    """Writes down which tensor operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(jobs: Sequence[SampleTask], dtype: torch.dtype = torch.float32) -> Counter[str]:
    """How often each tensor operation runs for a batch; the library does not take float64."""
    logits = torch.randn(len(jobs), 4000, dtype=dtype)
    with Operations() as seen:
        Sampler().sample(logits, jobs)
    return Counter(seen.names)


def test_a_greedy_batch_costs_no_pass_of_torch_over_the_vocabulary():
    """NumPy finds the best of all rows at once, many numbers at a time."""
    seen = operations([task(temperature=0.0)] * 8)

    others = {"exp_", "cumsum", "sort", "topk", "amax", "_to_copy", "gather", "index"}
    assert not seen.keys() & {"argmax", *others}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@given(rows=st.lists(row, min_size=1, max_size=5))
def test_greedy_takes_what_argmax_takes_in_every_format(dtype, rows):
    logits = torch.tensor(rows, dtype=dtype)
    sampled = Sampler().sample(logits, [task(temperature=0.0)] * len(rows))

    assert [tokens[0].token_id for tokens in sampled] == logits.argmax(-1).tolist()


def test_nothing_is_sorted_unless_a_truncation_asks_for_it():
    assert "sort" not in operations([task(), task(min_p=0.1)], torch.float64)
    assert "sort" in operations([task(top_k=5)], torch.float64)


@needs_library
def test_with_the_library_no_row_costs_an_operation_of_torch():
    kinds = [task(), task(top_p=0.5), task(logprobs=3), task(logit_bias={1: 2.0}, banned=[4])]
    assert not operations(kinds)


def test_more_rows_cost_no_more_operations():
    """Rows are worked on together, whatever each of them asks for."""
    kinds = [
        task(),
        task(temperature=0.0),
        task(top_p=0.5, frequency_penalty=1.0, output=[3]),
        task(top_k=3, logit_bias={1: 2.0}, banned=[4]),
    ]

    assert operations(kinds * 8, torch.float64) == operations(kinds * 2, torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_seed_draws_the_same_tokens_on_every_device():
    """Given the same logits: exact sums leave only the last bits of exp to differ."""
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    jobs = [task(seeds=range(50), top_p=p) for p in (1.0, 0.9)] * 8

    assert Sampler().sample(logits.cuda(), jobs) == Sampler().sample(logits, jobs)

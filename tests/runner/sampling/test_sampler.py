"""The sampler follows its parameters.

The oracle is ``sampling_reference``, with which ``native/test_sampling`` compares the library. Rows
in float64 are sampled in torch.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.core.plan import SampleTask
from ostinato.runner.native.sampling import Draws
from ostinato.runner.sampling.randomness import uniform
from ostinato.runner.sampling.sampler import Sampler
from ostinato.runner.sampling.torch_draws import draw_rows
from ostinato.runner.token_lists import prepare
from tests.runner.sampling.sampling_reference import check, random_logits, random_task, task
from tests.support.instruction_sets import needs_library

VOCAB = 7
# A grid of few values, so that ties are common.
logit = st.integers(-12, 12).map(lambda step: step / 4)
row = st.lists(logit, min_size=VOCAB, max_size=VOCAB)


def sample(logits: Sequence[Sequence[float]], jobs: Sequence[SampleTask]) -> list[list[int]]:
    """Token ids by row and seed, from float64 logits."""
    results = Sampler().sample(torch.tensor(logits, dtype=torch.float64), jobs)
    return [[sampled.token_id for sampled in result] for result in results]


def drawn_in_torch(logits: Tensor, tasks: Sequence[SampleTask]) -> Draws:
    lists = [prepare(each.params, logits.shape[1]) for each in tasks]
    numbers = [[uniform(seed, len(each.output)) for seed in each.seeds] for each in tasks]
    return draw_rows(logits, tasks, lists, numbers)


@pytest.mark.parametrize("vocab", [1, 7, 65, 700])
def test_torch_draws_what_the_definition_says(vocab: int):
    """Penalties, bias, bans, temperatures and truncations, ties and faults, mixed in one batch."""
    random = np.random.default_rng(vocab)
    for _ in range(8):
        logits = random_logits(random, 16, vocab)
        tasks = [random_task(random, vocab) for _ in logits]

        together = check(drawn_in_torch, logits, tasks)

        alone = [drawn_in_torch(logits[i : i + 1], tasks[i : i + 1]) for i in range(16)]
        assert together.ids == [each.ids[0] for each in alone]


def test_many_draws_follow_the_distribution():
    """20,000 fixed seeds over eight tokens; chi-square stays below its 99.9 % point."""
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5]
    job = task(seeds=range(20_000), temperature=0.8)

    counts = Counter(sample([logits], [job])[0])

    means = (20_000 * torch.tensor(logits).div(0.8).softmax(0)).tolist()
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

"""Log-probabilities equal the model's, and ranks follow their order."""

import math
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.plan import TokenLogprob
from ostinato.errors import EngineError
from ostinato.runner.sampling.logprobs import rows_at_once, token_logprobs
from ostinato.runner.sampling.sampler import Sampler
from tests.runner.sampling.sampling_reference import task

VOCAB = 6
rows = st.lists(st.lists(st.integers(-8, 8), min_size=VOCAB, max_size=VOCAB), max_size=5)


def logprobs_of(
    logits: torch.Tensor, tokens: "array[int]", count: int
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """One token per row, each with ``count`` alternatives, as for a prompt."""
    return token_logprobs(logits, range(len(tokens)), tokens, [count] * len(tokens))


def reference(logits: list[int], token: int, count: int) -> list[tuple[int, float, int]]:
    """Own token first, then the likeliest ones: (id, log-probability, rank)."""
    normaliser = math.log(math.fsum(math.exp(value) for value in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    return [(i, logits[i] - normaliser, order.index(i) + 1) for i in [token, *order[:count]]]


@given(rows, st.data(), st.integers(0, VOCAB + 2))
def test_prompt_logprobs_are_those_of_the_reference(logits, data, count):
    """Values, order and ranks, ties included; more alternatives than tokens are all tokens."""
    targets = [data.draw(st.integers(0, VOCAB - 1)) for _ in logits]

    found = logprobs_of(
        torch.tensor(logits, dtype=torch.float64).view(-1, VOCAB), array("I", targets), count
    )

    assert len(found) == len(logits)
    for line, target, entries in zip(logits, targets, found, strict=True):
        wanted = reference(line, target, count)
        assert [(e.token_id, e.rank) for e in entries] == [(i, rank) for i, _, rank in wanted]
        assert [e.logprob for e in entries] == pytest.approx([value for _, value, _ in wanted])


def test_logprobs_of_samples_ignore_bias_penalties_and_temperature():
    """The model held token 2 for the least likely; only the bias made it win."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    job = task(temperature=0.1, logit_bias={2: 50.0}, frequency_penalty=2.0, logprobs=2, seeds=[3])

    [[sampled]] = Sampler().sample(logits, [job])

    own, first, second = sampled.logprobs
    assert sampled.token_id == own.token_id == 2
    assert [(e.token_id, e.rank) for e in (own, first, second)] == [(2, 3), (0, 1), (1, 2)]
    assert own.logprob == pytest.approx(-math.log(1 + math.e + math.e**2))


def test_only_rows_that_ask_for_logprobs_get_them():
    """Each sample of a fork has its own; zero alternatives is the token alone."""
    logits = torch.tensor([[0.0, 9.0], [9.0, 0.0], [5.0, 5.0]])
    jobs = [task(), task(temperature=0.0, logprobs=0), task(logprobs=1, seeds=range(8))]

    silent, [greedy], fork = Sampler().sample(logits, jobs)

    assert silent[0].logprobs == ()
    assert greedy.logprobs == (
        TokenLogprob(0, pytest.approx(-math.log1p(math.exp(-9)), abs=1e-7), 1),
    )
    assert [(s.logprobs[0].token_id, s.logprobs[0].rank) for s in fork] == [
        (s.token_id, s.token_id + 1) for s in fork
    ]
    assert all(s.logprobs[1].token_id == 0 for s in fork)
    assert [s.logprobs[1].logprob for s in fork] == pytest.approx([-math.log(2)] * 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_normalised_in_float32(dtype: torch.dtype):
    """A thousand equal tokens have exactly a thousandth each, which no 16-bit sum would give."""
    [[own]] = logprobs_of(torch.zeros(1, 1000, dtype=dtype), array("I", [5]), 0)

    assert own.logprob == pytest.approx(-math.log(1000), abs=1e-6)
    assert own.rank == 6


def test_float64_logits_stay_float64():
    [[own]] = logprobs_of(torch.zeros(1, 3, dtype=torch.float64), array("I", [0]), 0)

    assert own.logprob == pytest.approx(-math.log(3), abs=1e-15)


def test_impossible_tokens_have_a_logprob_of_minus_infinity():
    [[own]] = logprobs_of(torch.tensor([[0.0, -math.inf]]), array("I", [1]), 0)

    assert own == TokenLogprob(1, -math.inf, 2)


def test_long_prompts_are_worked_on_in_pieces_that_do_not_show(monkeypatch: pytest.MonkeyPatch):
    """A vocabulary as wide as one piece: each row is a piece of its own."""
    monkeypatch.setattr("ostinato.runner.sampling.logprobs.MAX_CELLS", 11)
    logits = torch.zeros(2, 9, dtype=torch.float64)  # in torch, also where there is a library
    logits[1, 7] = 30.0

    assert rows_at_once(9) == rows_at_once(18) == 1
    found = token_logprobs(logits, [1, 0, 1], [7, 7, 8], [1, 0, 1])
    assert [[(e.token_id, e.rank) for e in entries] for entries in found] == [
        [(7, 1), (7, 1)],
        [(7, 8)],
        [(8, 9), (7, 1)],
    ]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_distribution_are_refused_by_row(broken: float):
    with pytest.raises(EngineError, match="row 1 of the logits is no distribution"):
        logprobs_of(torch.tensor([[0.0, 1.0], [0.0, broken]]), array("I", [0, 0]), 1)

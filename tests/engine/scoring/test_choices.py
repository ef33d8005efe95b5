"""Choices are as likely as transformers says, and the prompt is computed once for all of them."""

import math

import pytest
import torch

from ostinato.errors import RequestError
from tests.exactness.reference import PROMPTS, Reference, random_ids
from tests.exactness.test_logits import TOLERANCE
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints

CHOICES = [random_ids(seed, 1 + seed % 4) for seed in range(40, 44)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_choice_is_the_sum_of_its_tokens(
    family: str, make_llm: MakeLLM, checkpoints: Checkpoints
):
    reference, llm = Reference(checkpoints.path(family)), make_llm(family)
    [prompt, *_] = PROMPTS

    for attempt in range(2):
        output = llm.choose(prompt, CHOICES)
        for choice, tokens in zip(output.choices, CHOICES, strict=True):
            rows = reference.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
            expected = rows.gather(1, torch.tensor(tokens)[:, None]).sum().item()
            assert choice.logprob == pytest.approx(expected, abs=TOLERANCE)
            assert choice.num_tokens == len(tokens)
            assert choice.is_greedy == (rows.argmax(-1).tolist() == tokens)
        # All but the last token of the prompt hit, which each choice computes for its logits.
        num_hitting = len(CHOICES) if attempt else len(CHOICES) - 1
        assert output.num_cached_tokens == num_hitting * (len(prompt) - 1)
    assert output.best.index == max(range(4), key=lambda i: output.choices[i].logprob)
    assert math.fsum(choice.probability for choice in output.choices) == pytest.approx(1)


def test_the_likeliest_token_is_a_greedy_choice(make_llm: MakeLLM, checkpoints: Checkpoints):
    reference, llm = Reference(checkpoints.path("llama")), make_llm("llama")
    following = reference.generated(PROMPTS[1])[:3]

    output = llm.choose(PROMPTS[1], [random_ids(50, 3), following])

    assert [choice.is_greedy for choice in output.choices] == [False, True]


def test_texts_are_tokenized_as_a_whole(make_llm: MakeLLM):
    """A choice begins where the tokens are no longer those of the prompt alone."""
    llm = make_llm("llama")
    tokenizer = llm.get_tokenizer()

    output = llm.choose("The same", [" prefix", " bass, another"])

    before = len(tokenizer("The same")["input_ids"])
    for choice in output.choices:
        whole = tokenizer(f"The same{choice.text}")["input_ids"]
        assert choice.num_tokens == len(whole) - before


@pytest.mark.parametrize(
    ("prompt", "choices", "named"),
    [
        ("a", [], "choices"),
        ("a", "bc", "choices"),
        ("a", [""], "choice=''"),
        ("a", [[5]], "token ids for all"),
        ([5, 6], ["a"], "token ids for all"),
        ([], [[5]], "a token each"),
        ([5], [[9999]], "9999"),
    ],
)
def test_a_mistake_is_named(make_llm: MakeLLM, prompt, choices, named: str):
    with pytest.raises(RequestError, match=named):
        make_llm("llama").choose(prompt, choices)

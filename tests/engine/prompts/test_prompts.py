"""Forms of a prompt, and the errors for all else."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.errors import EmptyPrompt, PromptTooLong, RequestError, TokenOutOfRange
from ostinato.engine.requests.prompts import Prompt, parse_prompt, parse_prompts
from tests.support.engines import assert_idle

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.mark.parametrize(
    "row",
    [[5, 6], (5, 6), range(5, 7), array("I", [5, 6]), array("q", [5, 6]), np.array([5, 6])],
    ids=["list", "tuple", "range", "array of I", "array of q", "numpy"],
)
def test_a_row_of_ids_is_one_prompt_whatever_holds_it(row: Any, llm: LLM):
    outputs = llm.generate(row, GREEDY, use_tqdm=False)

    assert [output.prompt_token_ids for output in outputs] == [[5, 6]]
    assert outputs[0].prompt is None


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("To be", 1),
        (["To be"], 1),
        (["To be", "or not"], 2),
        ([5, 6, 7], 1),
        ([[5, 6, 7]], 1),
        ([[5], (6,), range(7, 9)], 3),
        (np.array([[5, 6], [7, 8]]), 2),
        ({"prompt": "To be"}, 1),
        ([{"prompt": "To be"}, {"prompt_token_ids": [5]}, "To be", [5]], 4),
        ([], 0),
        ((), 0),
    ],
)
def test_one_prompt_is_told_from_a_batch(prompts: Any, count: int):
    assert len(parse_prompts(prompts)) == count


def test_prompts_may_come_from_a_generator(llm: LLM):
    def prompts() -> Iterator[list[int]]:
        yield [5, 6]
        yield [7]

    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)

    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [7]]


def test_a_batch_of_none_brings_nothing(llm: LLM):
    assert llm.generate([], GREEDY) == []


def test_a_text_is_tokenized_as_the_tokenizer_does(llm: LLM):
    text = "A phrase that keeps returning"

    output = llm.generate(text, GREEDY, use_tqdm=False)[0]

    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer()(text)["input_ids"]


def test_a_dict_says_how_the_cache_is_used():
    asked = {"prompt": "x", "cache_salt": "s", "cache_read": False, "cache_write": False}

    assert parse_prompt(asked) == Prompt("x", None, "s", cache_read=False, cache_write=False)
    assert parse_prompt({"prompt_token_ids": [1]}) == Prompt(token_ids=[1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "not NoneType"),
        (5, "not int"),
        (b"To be", "not bytes"),
        ([b"To be"], "not bytes"),
        ({1, 2}, "not int"),
        (np.array(5), "not ndarray"),
        (memoryview(b"To be"), "not memoryview"),
        (["To be", None], "not NoneType"),
        ([[1, 2], object()], "not object"),
        ({}, "needs one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "needs one of"),
        ({"promt": "x"}, "unknown prompt key 'promt': known are prompt,"),
        ({"prompt": None}, "prompt=None: must be a text"),
        ({"prompt": [1, 2]}, r"prompt=\[1, 2\]: must be a text"),
        ({"prompt_token_ids": None}, "prompt_token_ids=None: must be a list of token ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids=5: must be"),
        ({"prompt_token_ids": "To be"}, "prompt_token_ids='To be': must be"),
        ({"prompt_token_ids": b"To be"}, "prompt_token_ids=b'To be': must be"),
        ({"prompt_token_ids": {3: 4}}, "prompt_token_ids={3: 4}: must be"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt=5: must be a str"),
        ({"prompt": "x", "cache_salt": None}, "cache_salt=None: must be a str"),
        ({"prompt": "x", "cache_read": 1}, "cache_read=1: must be a bool"),
        ({"prompt": "x", "cache_write": "no"}, "cache_write='no': must be a bool"),
        ("half \ud83d", r"prompt='half \\ud83d': .*'\\ud83d' at position 5 is half a character"),
        ({"prompt": "\ud83d"}, "is half a character"),
        ({"prompt": "x", "cache_salt": "\ud83d"}, r"cache_salt='\\ud83d': "),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str, llm: LLM):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)

    assert_idle(llm.engine)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1], "token id -1 at position 0 is not an integer"),
        ([5, 320], "token id 320 at position 1 is outside the vocabulary.* from 0 to 319"),
        ([2**40], "token id 1099511627776 at position 0"),
        ([5, 1.5], "token id 1.5 at position 1"),
        ([5, None], "token id None at position 1"),
        ([5, "6"], "token id '6' at position 1"),
        ([[[5]]], r"token id \[5\] at position 0"),
        (array("i", [5, -2]), "token id -2 at position 1"),
        (np.array([5, -2]), "token id -2 at position 1"),
        (np.array([1.5]), "not float64 of shape"),
        (np.array([True]), "not bool of shape"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(row: Any, message: str, llm: LLM):
    with pytest.raises(TokenOutOfRange, match=message):
        llm.generate(row, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompt", ["", [""], [[]], {"prompt_token_ids": []}, np.array([], int)])
def test_an_empty_prompt_is_refused(prompt: Any, llm: LLM):
    with pytest.raises(EmptyPrompt, match="at least one is needed"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(llm: LLM):
    """The model has 256 places; the first 255 of them may be the prompt's."""
    with pytest.raises(PromptTooLong, match="256 tokens, and max_model_len=256 leaves no room"):
        llm.generate([5] * 256, GREEDY, use_tqdm=False)

    output = llm.generate([5] * 255, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_a_text_that_is_too_long_is_refused_with_our_words_alone(
    bard: LLM, capfd: pytest.CaptureFixture[str]
):
    """``transformers`` warns of long texts on its own; that would say it twice."""
    with pytest.raises(PromptTooLong, match="the prompt has 3000 tokens, and max_model_len=2048"):
        bard.generate("x" * 3000, GREEDY, use_tqdm=False)

    assert capfd.readouterr() == ("", "")


def test_a_refused_prompt_takes_the_good_ones_of_its_batch_along(llm: LLM):
    """Everything is checked before anything runs; then a good batch works."""
    before = llm.engine.scheduler_stats.num_steps
    with pytest.raises(RequestError):
        llm.generate([[5, 6], [], [7]], GREEDY, use_tqdm=False)
    assert llm.engine.scheduler_stats.num_steps == before

    assert len(llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)) == 2

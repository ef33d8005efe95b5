"""A list is prepared once per request, whatever its prompts, forks and tokens."""

import asyncio
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.loop import request_factory
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.text.stop_strings import StopChecker, StopStrings
from ostinato.runner import token_lists
from tests.engine.loop.stepping import async_llm, last
from tests.support.models.checkpoints import Checkpoints

PROMPTS = [[10 + number, *range(3, 12)] for number in range(6)]
LISTS: dict[str, Any] = {
    "allowed_token_ids": list(range(5, 300)),
    "bad_words": ["the", "a quite long word"],
    "bad_words_ids": [[7], [8, 9]],
    "logit_bias": {7: 1.0},
    "stop": ["never said", "nor this"],
    "stop_token_ids": [301, 302],
    "min_tokens": 2,
    "max_tokens": 4,
}


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often lists are prepared."""
    counts: Counter[str] = Counter()
    for module, name in (
        (request_factory, "resolve_params"),
        (request_factory, "StopStrings"),
        (token_lists, "prepare"),
    ):
        monkeypatch.setattr(module, name, counted(counts, name, getattr(module, name)))
    return counts


def counted(counts: Counter[str], name: str, function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        counts[name] += 1
        return function(*arguments)

    return call


def test_prompts_and_forks_share_what_is_prepared_of_their_lists(
    llm: LLM, preparations: Counter[str]
):
    llm.generate(PROMPTS, SamplingParams(n=3, seed=1, **LISTS), use_tqdm=False)
    assert preparations == {"resolve_params": 1, "StopStrings": 1, "prepare": 1}


def test_parameters_that_were_changed_between_calls_are_prepared_again(llm: LLM):
    """They are mutable, as in vLLM: the second call has what they say then."""
    params = SamplingParams(max_tokens=2, allowed_token_ids=[20])
    [first] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    for name, value in {"max_tokens": 3, "allowed_token_ids": [22]}.items():
        setattr(params, name, value)
    [second] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert list(first.outputs[0].token_ids) == [20, 20]
    assert list(second.outputs[0].token_ids) == [22, 22, 22]


async def test_requests_of_a_server_share_it_too(
    checkpoints: Checkpoints, preparations: Counter[str]
):
    with async_llm(checkpoints, num_blocks=64) as llm:
        params = SamplingParams(n=2, seed=1, **LISTS)
        await asyncio.gather(*(last(llm.generate(prompt, params)) for prompt in PROMPTS))
    assert preparations == {"resolve_params": 1, "StopStrings": 1, "prepare": 1}


def test_what_was_prepared_goes_with_the_parameters(llm: LLM, preparations: Counter[str]):
    for _ in range(3):
        llm.generate(PROMPTS[:1], SamplingParams(**LISTS), use_tqdm=False)
    assert preparations["resolve_params"] == preparations["prepare"] == 3

    lists, params = token_lists.PreparedLists(), SamplingParams(allowed_token_ids=[3])
    tracemalloc.start()
    lists.of(params, 2**23)
    held, _ = tracemalloc.get_traced_memory()
    del params
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held > 2**20 > 2**17 > left


def test_a_thousand_outputs_share_their_stop_strings(llm: LLM):
    """64 strings of 1,000 characters: as many of their own would take half a gigabyte."""
    stop = [f"{number:02}" + "ab" * 499 for number in range(64)]
    params = SamplingParams(stop=stop)
    requests = [llm.engine.make_request(Prompt(token_ids=ids), params) for ids in PROMPTS]
    tracemalloc.start()
    checkers = [StopChecker(requests[number % 6].stops) for number in range(1000)]
    shown = [checker.append("a text with 00ab and 0") for checker in checkers]
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len({id(request.stops) for request in requests}) == 1
    assert set(shown) == {"a text with 00ab and "}
    assert bytes_held < 1000 * 1024


def test_a_list_of_ids_is_walked_once_however_many_tokens_are_looked_up():
    """The scheduler looks up each new token among the stop ids."""
    stops = SamplingParams(stop_token_ids=list(range(0, 400_000, 2))).stop_token_ids
    assert 8 in stops and 9 not in stops and stops[:3] == (0, 2, 4)

    class Walked(int):
        comparisons = 0

        def __eq__(self, other: object) -> bool:
            Walked.comparisons += 1
            return int(self) == other

        __hash__ = int.__hash__

    assert Walked(399_998) in stops and Walked(399_999) not in stops
    assert Walked.comparisons <= 8


def test_a_stop_string_that_has_not_begun_is_not_looked_at():
    """Of a thousand, those whose first letter comes."""
    stops = StopStrings([f"{chr(200 + number)}end" for number in range(1000)])
    begun, match = stops.step({}, "x")
    assert (begun, match) == ({}, None)
    assert list(stops.step({}, chr(205))[0].values()) == [1]

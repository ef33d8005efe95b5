"""The same requests under the built-in parts, without a tensor."""

from array import array
from dataclasses import replace

import pytest

from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.labs.side_by_side import compare, served_requests
from ostinato.plugins import arrivals
from ostinato.plugins.arrivals import NotedArrivals, arrivals_of
from ostinato.settings import PrefixCacheConfig

CACHE = PrefixCacheConfig(num_blocks=16, block_size=4)
SCHEDULING = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def serve(prompts: list[str], cache_config: PrefixCacheConfig = CACHE, output_tokens: int = 2):
    """Serve prompts one after the other under a noting order; return the arrivals."""
    cache = build_cache(cache_config, lambda: 0.0)
    scheduler = build_scheduler(SCHEDULING, cache, lambda: 0.0, wrap_order=NotedArrivals)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        tokens = array("I", map(ord, prompt))
        scheduler.add(Request(RequestId(str(number)), tokens, params), (0,))
        while scheduler.has_work:
            plan = scheduler.plan()
            outcomes = (
                SequenceResult((SampledToken(65),) if s.sample else ()) for s in plan.sequences
            )
            scheduler.commit(StepResult(tuple(outcomes)))
    return arrivals_of(scheduler.requests.order)


def test_under_the_same_parts_the_hits_are_the_same():
    """The replay counts what the engine counted, sequence by sequence."""
    served = served_requests(serve(["ABCDEFGHIJ", "ABCDEFGHXY", "ABCDEFGHIJ", "QRST"]))
    both = compare(served, CACHE, SCHEDULING)
    assert (both.num_requests, both.prompt_tokens) == (4, 34)
    assert both.own_tokens == both.built_in_tokens == 8 + 9


def test_a_cache_that_is_off_hits_nothing_and_the_built_in_parts_do():
    """As a plug-in that finds nothing would be shown."""
    off = replace(CACHE, enable_prefix_caching=False)
    both = compare(served_requests(serve(["ABCDEFGHIJ"] * 3, off)), CACHE, SCHEDULING)
    assert (both.own_tokens, both.built_in_tokens) == (0, 18)


def test_answers_are_part_of_what_is_cached():
    """The next turn of a chat hits the answer that was really given."""
    both = compare(served_requests(serve(["ABCDEF", "ABCDEFAAZ"])), CACHE, SCHEDULING)
    assert both.own_tokens == both.built_in_tokens == 7


def test_the_notes_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrivals, "MAX_ARRIVALS", 5)
    assert len(serve(["AB"] * 8)) == 5


@pytest.mark.parametrize("num", [0, 1])
def test_what_runs_is_not_compared_yet(num: int):
    assert compare(served_requests(serve(["ABCD"] * num)), CACHE, SCHEDULING).num_requests == num

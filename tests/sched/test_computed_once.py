"""Law 1 at its promised size: a thousand prompts that share 512 tokens, all at once, cold."""

from array import array

import pytest

from ostinato.assembly import build_cache
from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.sched.scheduler import Scheduler
from ostinato.settings import IndexName, PrefixCacheConfig

SHARED = 512


def scheduler_with_room(
    index: IndexName, block_size: int, max_chunk_tokens: int | None = None, requests: int = 1000
) -> Scheduler:
    """Return a scheduler whose pool holds everything, with the default budget and seats."""
    own_blocks = -(-100 // block_size) + 1
    num_blocks = -(-SHARED // block_size) + requests * own_blocks
    cache = PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size, index=index)
    return Scheduler(SchedulerConfig(max_chunk_tokens=max_chunk_tokens), build_cache(cache).manager)


def send_a_wave(scheduler: Scheduler, own: int = 16, requests: int = 1000) -> int:
    """Send all prompts at once, each with ``own`` tokens; return the prompt tokens computed."""
    before = scheduler.stats.computed_prompt_tokens
    params = SamplingParams(max_tokens=1)
    for number in range(requests):
        prompt = array("I", range(SHARED)) + array("I", [1_000_000 + number] * own)
        scheduler.add(Request(RequestId(f"{number}"), prompt, params), (number,))
    while scheduler.has_work:
        scheduler.commit(answer(scheduler.plan()))
    return scheduler.stats.computed_prompt_tokens - before


def answer(plan: StepPlan) -> StepResult:
    """Return the same token for every sequence that samples."""
    tokens = [(SampledToken(7),) if s.sample is not None else () for s in plan.sequences]
    return StepResult(tuple(map(SequenceResult, tokens)))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("max_chunk_tokens", [None, 100])
@pytest.mark.parametrize(
    "requests, block_size, again", [(200, 4, 1), (1000, 16, 1), (200, 256, 16)]
)
def test_a_thousand_cold_prompts_compute_their_shared_prefix_once(
    index, requests, block_size, again, max_chunk_tokens
):
    """512 + 1,000 x 16 tokens; sent again, one token each, or at most the last block."""
    scheduler = scheduler_with_room(index, block_size, max_chunk_tokens, requests)
    assert send_a_wave(scheduler, requests=requests) <= SHARED + requests * 16
    assert send_a_wave(scheduler, requests=requests) <= requests * again
    assert scheduler.cache.num_live_tables == 0


def test_a_prefix_that_ends_within_a_full_block_is_computed_once_as_well(index):
    """512 tokens are five blocks of 100 and twelve tokens of the sixth, which are copied."""
    scheduler = scheduler_with_room(index, block_size=100)
    assert send_a_wave(scheduler, own=88) <= SHARED + 1000 * 88


def test_the_watch_would_see_it_if_nothing_were_shared(index):
    """With prefix caching off every token of every prompt is computed."""
    cache = PrefixCacheConfig(
        num_blocks=9000, block_size=16, index=index, enable_prefix_caching=False
    )
    scheduler = Scheduler(SchedulerConfig(), build_cache(cache).manager)
    assert send_a_wave(scheduler, requests=200) == 200 * (SHARED + 16)

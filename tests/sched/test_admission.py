"""What can never be served is refused at once, with the numbers, and changes nothing (law 6)."""

import pytest

from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError, DuplicateRequest, EmptyPrompt, PromptTooLong
from ostinato.sched.scheduler import max_sequence_tokens
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler
from tests.support.cache.whole_state import whole_state


def refuses(tiny: TinyScheduler, error: type[Exception], prompt: str, **how: object) -> str:
    """Add a request that is refused, see that nothing has changed, and return the message."""
    before = tiny.state, whole_state(tiny.cache.manager), tiny.scheduler.has_work
    with pytest.raises(error) as caught:
        tiny.add("refused", prompt, **how)
    assert (tiny.state, whole_state(tiny.cache.manager), tiny.scheduler.has_work) == before
    return str(caught.value)


def test_an_empty_prompt_is_refused():
    assert "at least one is needed" in refuses(tiny_scheduler(), EmptyPrompt, "")


def test_a_prompt_as_long_as_the_model_leaves_no_room_for_an_answer():
    """One token shorter is served."""
    tiny = tiny_scheduler(max_model_len=5)
    message = refuses(tiny, PromptTooLong, "ABCDE")
    assert "5 tokens" in message and "max_model_len=5" in message
    tiny.add("one", "ABCD")
    assert tiny.run() == ["one:ABCD"]


def test_a_prompt_longer_than_the_pool_is_refused():
    """One that fills it to the last slot is served."""
    tiny = tiny_scheduler(num_blocks=2)
    message = refuses(tiny, PromptTooLong, "ABCDEFGHI")
    assert "9 tokens and needs 3 blocks of 4, but the pool has 2" in message
    assert "num_blocks or kv_cache_memory" in message
    tiny.add("one", "ABCDEFGH")
    assert tiny.run() == ["one:ABCDEFGH"]


def test_a_pool_of_one_block_of_one_token_serves_prompts_of_one_token():
    tiny = tiny_scheduler(num_blocks=1, block_size=1)
    refuses(tiny, PromptTooLong, "AB")
    tiny.add("one", "A", max_tokens=9)
    tiny.add("two", "B", n=2)
    tiny.run()
    assert tiny.outputs == {"one": "a", "two": "a", "two/1": "k"}


def test_an_id_may_not_be_used_twice_at_a_time():
    """Also while only a sibling is left of the first; then it may."""
    tiny = tiny_scheduler()
    tiny.add("one", "ABC", n=2, max_tokens=3)
    with pytest.raises(DuplicateRequest, match=r"'one' is in use.*choose another id"):
        tiny.add("one", "XYZ")
    tiny.step()
    tiny.stop("one", "a")
    with pytest.raises(DuplicateRequest):
        tiny.add("one", "XYZ")
    tiny.run()
    tiny.scheduler.check(tiny.sequences["one"].request)


def test_checking_a_request_does_not_add_it():
    """The same refusals, and no effects."""
    tiny = tiny_scheduler(num_blocks=1)
    tiny.add("one", "ABC")
    request = tiny.checks.live()[0].request
    with pytest.raises(DuplicateRequest):
        tiny.scheduler.check(request)
    tiny.cancel("one")
    tiny.scheduler.check(request)
    assert not tiny.scheduler.has_work


def test_a_refused_request_takes_no_number():
    tiny = tiny_scheduler(num_blocks=2)
    refuses(tiny, PromptTooLong, "ABCDEFGHI", n=3)
    tiny.add("one", "ABC")
    assert tiny.checks.live()[0].sequence_id == 0


def test_the_longest_sequence_is_the_models_or_the_pools_with_one_token_more():
    """The last token of all is sampled and never computed: it needs no slot."""
    pool = PrefixCacheConfig(num_blocks=2, block_size=4)
    assert max_sequence_tokens(SchedulerConfig(), pool) == 9
    assert max_sequence_tokens(SchedulerConfig(max_model_len=9), pool) == 9
    assert max_sequence_tokens(SchedulerConfig(max_model_len=8), pool) == 8


def test_a_budget_below_the_number_of_seats_is_refused():
    """Else decodes could starve."""
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3 is below max_num_seqs=4"):
        tiny_scheduler(budget=3, max_num_seqs=4)

"""Log-probabilities of the prompt: each token from the second on, exactly once."""

import pytest

from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler


def logprobs(tiny: TinyScheduler, name: str) -> str:
    """Return what came back, as letters with their positions."""
    found = tiny.sequences[name].prompt_logprobs
    return " ".join(f"{chr(t[0].token_id)}{-t[0].logprob:.0f}" for t in found)


def test_every_prompt_token_but_the_first_has_a_log_probability(tiny):
    """Before the first nothing stands that could predict it."""
    tiny.serve("one", "ABCDE", prompt_logprobs=0)
    assert logprobs(tiny, "one") == "B1 C2 D3 E4"


def test_a_prompt_of_one_token_has_none(tiny):
    tiny.serve("one", "A", prompt_logprobs=0)
    assert logprobs(tiny, "one") == ""


def test_without_asking_there_are_none(tiny):
    tiny.add("one", "ABCDE")
    tiny.step()
    assert not tiny.plan.sequences[0].prompt_targets
    assert logprobs(tiny, "one") == ""


def test_they_bypass_hits(tiny):
    """Every position needs its logits; but what is computed can be found by others."""
    tiny.serve("before", "ABCDE")
    tiny.add("one", "ABCDE", prompt_logprobs=0)
    tiny.add("after", "ABCDE")
    assert tiny.step() == "one:ABCDE after:....E"
    assert logprobs(tiny, "one") == "B1 C2 D3 E4"


@pytest.mark.parametrize(("num_steps", "goes_on"), [(1, ",,CD"), (2, "....EF")])
def test_a_preempted_prompt_has_each_of_them_once(index, num_steps, goes_on):
    """It goes on behind the tokens whose logits are no longer needed."""
    tiny = tiny_scheduler(index=index, budget=2)
    tiny.add("one", "ABCDEFG", prompt_logprobs=0)
    for _ in range(num_steps):
        tiny.step()
    tiny.preempt_all()
    assert tiny.step() == f"one:{goes_on}"
    tiny.run()
    assert logprobs(tiny, "one") == "B1 C2 D3 E4 F5 G6"


def test_from_a_start_they_are_those_behind_it_and_what_precedes_hits(tiny):
    """The token before the first that is scored is computed again, for its logits."""
    tiny.serve("before", "ABCDEFGH")
    tiny.add("one", "ABCDEFXY", prompt_logprobs=0, prompt_logprob_start=6)
    assert tiny.step() == "one:....,FXY"
    assert logprobs(tiny, "one") == "X6 Y7"


def test_who_has_all_of_them_comes_back_with_hits(tiny):
    """After its prompt it is a request like any other (law 1)."""
    tiny.add("one", "ABCDE", prompt_logprobs=0, max_tokens=3)
    tiny.step()
    tiny.preempt_all()
    assert tiny.step() == "one:....,a"
    assert not tiny.plan.sequences[0].prompt_targets
    tiny.run()
    assert logprobs(tiny, "one") == "B1 C2 D3 E4"


def test_siblings_compute_them_once(index):
    """The first continuation has them; one that waited for a seat comes back with hits."""
    tiny = tiny_scheduler(index=index, max_num_seqs=1)
    tiny.add("one", "ABCDE", prompt_logprobs=0, n=2, max_tokens=2)
    assert tiny.run() == ["one:ABCDE", "one:a", "one/1:....,k"]
    assert logprobs(tiny, "one") == "B1 C2 D3 E4"
    assert logprobs(tiny, "one/1") == ""

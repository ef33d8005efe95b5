"""What is said of a model that keeps states: counters, and where a state was missing."""

from ostinato.observe.explain import explain
from ostinato.settings import StateConfig
from tests.support.cache.tiny_scheduler import tiny_scheduler

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def served(index, *prompts: str):
    """Serve prompts one after the other, with states at multiples of 8 and none between."""
    tiny = tiny_scheduler(64, index=index, states=StateConfig(9, 8, 0))
    for number, prompt in enumerate(prompts):
        tiny.serve(str(number), prompt)
    return tiny


def told(tiny, name: str) -> list[str]:
    """Return the sentences of a request's explanation."""
    spans = explain(tiny.cache.history, name).spans
    return [f"{span.start}..{span.stop} {span.sentence}" for span in spans]


def test_an_explanation_says_where_the_state_was_kept_and_where_the_prompts_part(index):
    tiny = served(index, ALPHABET, ALPHABET[:18] + "12345678901")
    assert told(tiny, "1") == [
        "0..18 state kept at 0, the prompts part at 18: 18 tokens computed again",
        "18..29 differs at token 18 from 0, the nearest prompt",
    ]


def test_of_an_identical_prompt_no_parting_is_told(index):
    tiny = served(index, ALPHABET, ALPHABET)
    assert told(tiny, "1") == [
        "0..24 found in the cache",
        "24..25 computed for 0, in a partly filled block that was not kept",
        "25..26 the last token is always computed: the next one needs its query",
    ]


def test_states_are_counted(index):
    tiny = served(index, ALPHABET, ALPHABET[:18] + "12345678901", ALPHABET[:18] + "xyz")
    states = tiny.cache.stats.states
    assert (states.num_slots, states.num_running, states.num_evicted) == (9, 0, 0)
    assert states.num_checkpoints == states.num_kept == 3, "24, 16 where they part, and 24 again"
    assert (states.num_hits, states.num_again_tokens) == (1, 16)

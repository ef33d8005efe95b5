"""``ostinato demo``: what it shows is what the engine counts."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ostinato.cli.demonstration.demo_examples import run_examples
from ostinato.cli.demonstration.demo_waves import MAX_CALLS, calls, calls_in_words
from ostinato.lab.size.quantities import write_seconds
from ostinato.runner.attention_choice import log_once
from tests.cli.engine_watch import EngineWatch, watching
from tests.cli.terminal import Terminal, row, unwrapped

CALLS = 6
PROMPT, SHARED, OWN, OUTPUT = 528, 512, 16, 4


@dataclass(frozen=True)
class Demo:
    """What a run of the demo said, and what its engines did."""

    figures: dict[str, Any]
    watch: EngineWatch


RADIX, HASH = ("radix", 16), ("hash", 4)


@pytest.fixture(scope="module", params=[RADIX, HASH], ids=["radix", "hash"])
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    """One run for each index, as JSON."""
    index, block_size = request.param
    options = ("--index", index, "--block-size", str(block_size), "--patience", "1000")
    with watching() as watch:
        text = Terminal().show("demo", "--calls", str(CALLS), *options, "--json")
    yield Demo(json.loads(text), watch)
    watch.check_nothing_is_held()


@pytest.fixture(scope="module")
def story() -> str:
    """What the demo shows in a terminal of 80 columns that gives up at once without a cache."""
    return Terminal().show("demo", "--calls", str(CALLS), "--patience", "0")


def test_the_demo_begins_without_a_warning_about_its_own_choice(caplog: pytest.LogCaptureFixture):
    """Its small tests have blocks of four letters, which plain torch computes on purpose."""
    log_once.cache_clear()
    run_examples("radix")
    assert caplog.messages == []


def test_the_four_tests_have_the_articles_numbers_corrected(demo: Demo):
    """Found in whole blocks of four, copied, computed: for each prompt in turn."""
    numbers = [
        [
            (prompt["found_tokens"], prompt["copied_tokens"], prompt["computed_tokens"])
            for prompt in example["prompts"]
        ]
        for example in demo.figures["examples"]
    ]

    assert numbers == [
        [(0, 0, 18), (16, 1, 1)],  # not "16/1 tokens cached, -15 to prefill"
        [(0, 0, 15), (12, 0, 3)],
        [(0, 0, 22), (0, 0, 20)],
        [(0, 0, 31), (0, 0, 20), (20, 0, 11)],  # the tail went, the root stayed
    ]


def test_each_wave_answers_all_calls_alike_and_computes_what_is_not_cached(demo: Demo):
    """All; then 512 + 6 x 16 at most, or each beginning that no other call has; then one each."""
    beginnings = {prompt[:end] for prompt in calls(CALLS) for end in range(1, PROMPT + 1)}
    waves = demo.figures["waves"]
    plain, cold, warm = (waves[name]["computed_tokens"] for name in ("no_cache", "cold", "warm"))

    assert (plain, warm) == (CALLS * PROMPT, CALLS)
    assert len(beginnings) <= cold <= SHARED + CALLS * OWN
    for wave in waves.values():
        assert (wave["answered_calls"], wave["prompt_tokens"]) == (CALLS, CALLS * PROMPT)
    assert demo.figures["compared_answers"] == demo.figures["equal_answers"] == CALLS


def test_a_single_call_computes_its_prompt_once_and_its_ending_after_that(demo: Demo):
    """Cold, all 528; warm, at most the 16 tokens that are its own."""
    first_token = demo.figures["first_token"]

    assert first_token["cold"]["computed_tokens"] == PROMPT
    assert 1 <= first_token["warm"]["computed_tokens"] <= OWN


def test_every_token_that_the_demo_speaks_of_went_through_the_embedding_and_no_other(demo: Demo):
    """Of each answer, all tokens but the last go through the model as well."""
    plain, cached = demo.watch.embedded_tokens[-2:]
    waves = {name: wave["computed_tokens"] for name, wave in demo.figures["waves"].items()}
    alone = sum(call["computed_tokens"] for call in demo.figures["first_token"].values())
    answers = CALLS * (OUTPUT - 1)

    assert plain == waves["no_cache"] + answers
    trials, rest = divmod(cached - waves["cold"] - waves["warm"] - 2 * answers, alone)
    assert trials >= 3
    assert rest == 0


def test_without_a_terminal_there_is_a_line_per_wave_and_no_progress_bar(story: str):
    assert "\r" not in story
    assert "━" not in story
    for name in ("no cache", "cold cache", "same again"):
        assert len(re.findall(rf"^   {name} .*tokens computed", story, re.MULTILINE)) == 1


@pytest.mark.parametrize("demo", [RADIX], ids=["radix"], indirect=True)
def test_the_table_says_what_was_counted(story: str, demo: Demo):
    """The same calls, so the same tokens as in the run that prints JSON."""
    cold = demo.figures["waves"]["cold"]["computed_tokens"]
    total, warm = CALLS * PROMPT, CALLS

    assert row(story, "prompt tokens") == [f"{total:,}"] * 3
    assert row(story, "through the model") == [f"{total:,}", f"{cold:,}", f"{warm:,}"]
    assert row(story, "saved") == ["-", f"{total - cold:,}", f"{total - warm:,}"]
    assert row(story, "share saved") == ["-", f"{1 - cold / total:.1%}", f"{1 - warm / total:.1%}"]
    assert row(story, "cold: nothing is cached")[0] == f"{PROMPT}"


def test_what_arithmetic_says_stands_beside_what_was_measured(story: str):
    """512 + 6 x 16 tokens computed and 5 x 512 saved."""
    assert "512 + 6 x 16 = 608 tokens and saves 2,560." in unwrapped(story)


def test_more_tokens_than_arithmetic_says_are_explained(terminal: Terminal):
    """A block of 1,000 is full in no prompt, so calls that come at once cannot share it."""
    story = terminal.show("demo", "--calls", str(CALLS), "--block-size", "1000", "--patience", "0")

    assert "the system prompt ends in a block that no call fills" in unwrapped(story)


def test_a_run_that_was_given_up_is_scaled_and_says_so(story: str):
    """One step without a cache is all that no patience allows."""
    text = unwrapped(story)
    [(tokens, whole)] = re.findall(r"gave up after .* and ([\d,]+) tokens; .* all ([\d,]+)\.", text)

    assert int(tokens.replace(",", "")) < CALLS * PROMPT
    assert whole == f"{CALLS * PROMPT:,}"
    assert row(story, "time")[0] == "about"
    assert "so no answers could be compared" in text


def test_it_ends_with_what_to_try_next(story: str):
    """Commands that exist."""
    _, following = story.split("What to try next")
    commands = re.findall(r"^   ostinato (\w+)", following, re.MULTILINE)

    assert commands == ["models", "chat", "generate", "savings", "size", "labs", "demo"]


def test_nothing_is_wider_than_80_columns(story: str):
    assert max(len(line.rstrip()) for line in story.splitlines()) <= 80
    assert "…" not in story


def test_on_a_narrow_screen_words_wrap_and_no_figure_is_lost(terminal: Terminal):
    """60 columns; an ellipsis or a column less would be another story."""
    terminal.columns = 60
    story = terminal.show("demo", "--calls", "2", "--patience", "1000")

    assert max(len(line.rstrip()) for line in story.splitlines()) <= 60
    assert "…" not in story
    assert row(story, "prompt tokens") == ["1,056"] * 3
    assert row(story, "through the model")[-1] == "2"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--calls", "1", "from 2 to"),
        ("--calls", str(MAX_CALLS + 1), "from 2 to"),
        ("--block-size", "0", "block_size=0"),
        ("--index", "tree", "radix, hash"),
        ("--patience", "-1", "patience=-1"),
        ("--patience", "nan", "patience=nan"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(terminal: Terminal, option, value, named):
    assert named in terminal.refuse("demo", option, value)


def test_no_two_calls_are_alike():
    """However many are asked for; each has 512 characters in common with all others."""
    prompts = calls(MAX_CALLS)

    assert len(set(prompts)) == MAX_CALLS
    assert {len(prompt) for prompt in prompts} == {PROMPT}
    assert len({prompt[:SHARED] for prompt in prompts}) == 1


def test_calls_in_words_are_equally_long_and_differ_at_their_end():
    """Here a word is a token."""
    asked = calls_in_words(200, str.split)

    assert len({*asked.prompts}) == len(asked.prompts) == 200
    words = [prompt.split() for prompt in asked.prompts]
    assert {len(prompt) for prompt in words} == {asked.system_tokens + asked.suffix_tokens}
    assert len({tuple(prompt[: asked.system_tokens]) for prompt in words}) == 1


def test_a_model_that_is_not_there_is_refused_before_anything_is_shown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OSTINATO_MODELS", "/nowhere")

    assert "ostinato models get smollm2" in terminal.refuse("demo", "--model", "smollm2")


def test_the_embedded_model_knows_every_character_of_the_calls(demo: Demo):
    """Or some letters would be one and the same token to it, and calls would be alike."""
    tokenizer = demo.watch.engines[0].loaded.require_tokenizer()
    letters = sorted(set("".join(calls(MAX_CALLS))))

    assert len(set(tokenizer("".join(letters))["input_ids"])) == len(letters)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.00996, "10 ms"),
        (0.1234, "123 ms"),
        (0.9996, "1.0 s"),
        (59.96, "60.0 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_are_written_with_two_or_three_digits(seconds: float, text: str):
    assert write_seconds(seconds) == text


def test_a_recorded_run_finds_the_same_when_it_is_replayed(terminal: Terminal, tmp_path):
    """Request by request: the calls at once, the same again, and those on an emptied cache."""
    path = tmp_path / "demo.trace"
    options = ("--calls", str(CALLS), "--patience", "0", "--index", "hash")
    told = terminal.show("demo", *options, "--record", str(path))
    assert "Recorded; replay it with: ostinato simulate" in told

    simulated = terminal.show("simulate", str(path), "-c", "100,1000", "--timed-requests", "0")
    text = unwrapped(simulated)
    found = re.search(r"each of the (\d+) requests found what it had found, ([\d,]+) token", text)
    assert found, text
    num_requests, num_tokens = (int(number.replace(",", "")) for number in found.groups())
    assert num_requests == 2 * CALLS + 2 * 5
    again = CALLS * (PROMPT - 1)  # the second time all that may hit does
    assert num_tokens > again + 5 * (SHARED - 16)

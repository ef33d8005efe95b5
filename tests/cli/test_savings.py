"""``ostinato savings``, as a user sees it."""

import json

from tests.cli.terminal import Terminal, row, unwrapped


def test_without_options_it_tells_the_story_of_a_thousand_calls(terminal: Terminal):
    """512 shared tokens, 16 of one's own, and one sentence that says it in words."""
    text = terminal.show("savings")

    assert "1,000 requests on a cold cache: 512 shared + 16 own tokens each" in text
    assert row(text, "no cache") == ["-", "-", "528", "528,000", "-"]
    assert row(text, "whole blocks") == ["512", "-", "16", "16,512", "511,488", "96.9%"]
    assert row(text, "by token") == ["512", "-", "16", "16,512", "511,488", "96.9%"]
    assert (
        "1,000 requests sharing 512 tokens send 16,512 tokens through the model instead of "
        "528,000: 96.9% fewer."
    ) in unwrapped(text)


def test_a_prefix_that_ends_inside_a_block_is_copied(terminal: Terminal):
    """4,097 tokens: one more by token than by whole blocks, for each of 49 requests."""
    text = terminal.show("savings", "-s", "4097", "-x", "100", "-n", "50")

    assert row(text, "whole blocks")[:3] == ["4,096", "-", "101"]
    assert row(text, "by token")[:3] == ["4,096", "1", "100"]
    assert "By token saves 49 tokens more" in unwrapped(text)
    assert "one after another" not in text


def test_identical_prompts_are_told_why_they_compute_a_token(terminal: Terminal):
    """The article's 511,488 is out of reach without a token of one's own."""
    text = terminal.show("savings", "--suffix", "0")

    assert row(text, "by token") == ["496", "15", "1", "1,511", "510,489", "99.7%"]
    assert "without a query there is no next token" in unwrapped(text)


def test_prompts_shorter_than_a_block_are_told_when_they_are_found(terminal: Terminal):
    """Their block is not full in any prompt, so it is sealed only at a request's end."""
    text = unwrapped(terminal.show("savings", "-s", "5", "-x", "4", "-n", "3"))

    assert "one after another, not for all at once" in text


def test_a_single_request_is_told_that_nothing_is_saved(terminal: Terminal):
    assert "Nothing is saved" in terminal.show("savings", "-n", "1")


def test_json_gives_every_figure(terminal: Terminal):
    """For scripts: plain numbers under plain names."""
    figures = json.loads(terminal.show("savings", "-s", "4097", "-x", "100", "-n", "2", "--json"))

    assert figures["all_prompt_tokens"] == 8394
    assert figures["without_cache"]["computed_tokens"] == 8394
    assert figures["by_whole_blocks"]["saved_tokens"] == 4096
    assert figures["by_token"] == {
        "found_per_request_tokens": 4096,
        "copied_per_request_tokens": 1,
        "computed_per_request_tokens": 100,
        "computed_tokens": 4297,
        "saved_tokens": 4097,
        "saved_share": 4097 / 8394,
    }


def test_what_cannot_be_is_refused_in_one_line(terminal: Terminal):
    assert terminal.refuse("savings", "--block-size", "0") == (
        "error: block_size=0: must be an integer, at least 1"
    )
    assert "the prompts are empty" in terminal.refuse("savings", "-s", "0", "-x", "0")


def test_the_table_fits_80_columns_for_a_hundred_thousand_long_prompts(terminal: Terminal):
    """No row wraps, so each is found as one line."""
    text = terminal.show("savings", "-s", "100000", "-x", "1000", "-n", "100000")

    assert row(text, "no cache")[-2:] == ["10,100,000,000", "-"]
    assert row(text, "by token")[-2:] == ["9,999,900,000", "99.0%"]
    assert max(len(line) for line in text.splitlines()) <= 80


def test_figures_too_long_for_the_screen_are_folded_and_not_cut(terminal: Terminal):
    """An ellipsis would make a number into another one."""
    terminal.columns = 40

    assert "…" not in terminal.show("savings", "-s", "100000", "-n", "1000000")

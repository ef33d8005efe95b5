"""``lint`` finds what is planted in the formats of four APIs, and nothing in clean logs of them."""

import json
from functools import cache

import pytest

from ostinato.lab.lint.history import GROWTH, keep_window
from ostinato.lab.lint.lint import Finding, LintReport, lint
from ostinato.lab.lint.order import sort_documents
from ostinato.lab.lint.rewrites import common_order
from ostinato.lab.lint.templates import slot_spans
from ostinato.lab.replay.word_tokens import word_tokenizer
from tests.lab.lint.api_bodies import CLEAN, lines_of
from tests.lab.lint.api_faults import FAULTS
from tests.lab.log.logged_requests import parse_request


def report_of(lines: list[bytes]) -> LintReport:
    requests = [parse_request(line, number) for number, line in enumerate(lines, 1)]
    return lint(requests, word_tokenizer())


@cache
def finding_of(name: str) -> Finding:
    [finding] = report_of(lines_of(FAULTS[name][1], name)).findings
    return finding


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name):
    finding = finding_of(name)
    assert finding.kind == FAULTS[name][0]
    assert finding.saved_tokens > 0 and finding.after > finding.before


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_log_has_no_finding(name):
    assert report_of(lines_of(CLEAN[name], name)).findings == ()


def test_values_are_shown_whole_with_the_words_before_them():
    """Names were once cut where a letter of the template stood in them: 'P', 'Gr', 'F'."""
    finding = finding_of("chat: name of the user in a part")
    assert finding.examples == ("Priya a", "Grace A. Hopper", "Fatima")
    assert finding.where == "The user is"
    finding = finding_of("anthropic: time in a system block")
    assert finding.examples[0] == "2025-03-01T00:00:00Z"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("anthropic: mark on a block that changes", "Put cache_control on system[0]."),
        ("anthropic: mark after what changes", "Put cache_control on system[0]."),
        ("anthropic: five marks", "may have 4 cache_control blocks and has 5"),
        ("anthropic: no mark", "Add cache_control to system (as a text block)."),
        ("anthropic: no mark on a shared document", "system[0] and messages[0].content[0]."),
        ("anthropic: no mark at the end of a conversation", "and the last block of each request."),
    ],
)
def test_advice_on_breakpoints_names_the_blocks(name, advice):
    assert advice in finding_of(name).advice


def test_a_stable_window_sends_no_less_history_than_was_sent():
    write = FAULTS["chat: rolling window"][1]
    lines = lines_of(write, "window")
    sent = [parse_request(line, number) for number, line in enumerate(lines, 1)]
    for before, after in zip(sent, keep_window(sent), strict=True):
        mine, kept = (request.prompt.messages[1:] for request in (before, after))
        assert [m.text for m in kept[-len(mine) :]] == [m.text for m in mine]
        assert sum(len(m.text) for m in kept) <= (1 + GROWTH) * sum(len(m.text) for m in mine)


def test_documents_keep_their_numbers_where_they_stood():
    """The second request has the same documents the other way round."""
    one, two = "The first document, long enough. ", "The second document, as long as it. "
    texts = [f"[1] {a}\n\n[2] {b}\n\nWhich?" for a, b in ((one, two), (two, one))]
    records = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    requests = [parse_request(json.dumps(record), 1) for record in records]
    first, second = sort_documents(requests)
    assert [first, second] == [requests[0]] * 2


def test_a_value_is_found_where_the_words_around_it_are_in_it_too():
    spans = slot_spans(["is", "\0", "a", "clerk"], "is Ada a b a clerk")
    assert spans == [(3, 10)]
    assert slot_spans(["is", "\0"], "was Ada") == []


def test_tools_that_disagree_are_listed_by_age():
    assert common_order([["b", "c"], ["a", "b"], ["a", "c"]]) == ["a", "b", "c"]
    assert common_order([["b", "a"], ["a", "b"]]) == ["b", "a"]


def test_texts_made_to_be_slow_are_cut_in_time():
    """Thousands of tags that are never closed, and of brackets that are."""
    texts = ["<p>" * 20_000, "<a><b>" * 9_000 + "</b></a>", '{"a":' * 9_000, "\n \n" * 20_000]
    records = [{"messages": [{"role": "user", "content": f"{n}{text}"}, {"role": "user",
               "content": "Who?"}]} for text in texts for n in range(2)]  # fmt: skip
    assert report_of([json.dumps(record).encode() for record in records]).num_requests == 8

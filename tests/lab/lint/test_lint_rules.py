"""Rules that ``lint --fix`` writes: the server reads them, and they fix what was found."""

import json
from pathlib import Path

import pytest

from ostinato.lab.lint.lint import lint
from ostinato.lab.lint.rules import VolatileRule
from ostinato.lab.replay.word_tokens import word_tokenizer
from ostinato.protocol.volatile import Stabiliser, read_rules
from tests.lab.log.logged_requests import parse_request

REST = "You are a herald. " + "Answer in verse, and never lie. Name your sources. " * 6


def rules_of(heads: list[str]) -> list[VolatileRule]:
    """Return the rules for a log of requests with these system texts."""
    requests = []
    for number, head in enumerate(heads):
        messages = [{"role": "system", "content": head}, {"role": "user", "content": f"{number}?"}]
        body = json.dumps({"timestamp": 60 * number, "body": {"messages": messages}})
        requests.append(parse_request(body, number + 1))
    report = lint(requests, word_tokenizer())
    return [rule for finding in report.findings for rule in finding.rules]


CLOCKS = [f"It is {8 + n // 6}:{n % 6}{n % 10} now. {REST}" for n in range(24)]


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        (CLOCKS, "timestamp"),
        ([f"It is 9:{n:02}.\nYou help.\n{REST}" for n in range(24)], "timestamp"),
        ([f"Today: 2026-11-{n + 1:02}. {REST}" for n in range(24)], "date"),
        ([f"Request {n} of many. {REST}" for n in range(24)], "counter"),
        ([f"Session sess_{n * 7919 % 10**6:06x} runs. {REST}" for n in range(24)], "id"),
        ([f"Nov {n + 1}, 2026 is the day. {REST}" for n in range(24)], "date"),
    ],
    ids=["time", "time before a line end", "day", "counter", "id", "at the beginning"],
)
def test_the_server_reads_the_rule_and_sets_aside_what_varies(heads, name, tmp_path: Path):
    [rule] = rules_of(heads)
    assert rule.name == name and rule.where == "system"
    path = tmp_path / "rules.toml"
    path.write_text(rule.as_toml())
    stabiliser = Stabiliser(read_rules(str(path)))
    settled = {
        stabiliser.settle([{"role": "system", "content": head}]).messages[0]["content"]
        for head in heads
    }
    assert len(settled) == 1, "all requests begin with the same text"
    assert f"[{name}]" in settled.pop()


def test_who_the_user_is_gets_no_rule():
    """A constant in place of a name would change the answer."""
    names = ("Ann", "Bob", "Cleo", "Dan")
    heads = [f"The user is {names[n % 4]}. {REST}" for n in range(24)]
    assert rules_of(heads) == []


def test_values_without_a_common_form_get_no_rule():
    """Nothing is guessed: a rule fits every request of the log, or is not written."""
    times = ("9:05", "five past nine", "quarter to ten o'clock", "10:00 sharp")
    heads = [f"It is {times[n % 4]} now. {REST}" for n in range(24)]
    assert rules_of(heads) == []

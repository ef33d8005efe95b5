"""``ostinato lint``, as a user sees it."""

import gzip
import json
import re
from pathlib import Path

from ostinato.protocol.volatile import read_rules
from tests.cli.terminal import Terminal
from tests.support.models.chat_templates import FAMILIES
from tests.support.models.checkpoints import make_tokenizer

SYSTEM = "Thou art the herald of a king, and answerest briefly, in verse, to whoever asketh. " * 2


def write(path: Path, heads: list[str]) -> str:
    lines = []
    for number, head in enumerate(heads):
        messages = [
            {"role": "system", "content": head},
            {"role": "user", "content": "Who comes" + " here" * (number % 3) + "?"},
        ]
        lines.append(json.dumps({"timestamp": 60 * number, "body": {"messages": messages}}))
    path.write_text("\n".join(lines))
    return str(path)


def test_a_time_at_the_head_is_found(terminal: Terminal, tmp_path: Path):
    heads = [f"It is {9 + n // 60}:{n % 60:02} now. {SYSTEM}" for n in range(20)]
    page = terminal.show("lint", write(tmp_path / "log.jsonl", heads))
    assert "20 requests, 1 template: 1 finding." in page
    assert "1. timestamp costs" in page
    assert "after 'It is': '9:00', '9:01', '9:02'" in page
    assert "Move the time to the end of the last message" in page
    assert "Tokens are words and pieces of words." in page


def test_a_time_above_a_document_is_found_in_its_message(terminal: Terminal, tmp_path: Path):
    messages = [
        [{"role": "user", "content": f"Read at 9:{n:02}: {SYSTEM} What of scene {n % 7}?"}]
        for n in range(20)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"body": {"messages": m}}) for m in messages))
    page = terminal.show("lint", str(log))
    assert "1. message_timestamp costs" in page
    assert "in messages[0] (user): '9:00', '9:01', '9:02'" in page


def test_requests_that_share_nothing_are_not_called_clean(terminal: Terminal, tmp_path: Path):
    """Where next to nothing hits, something breaks the prefixes, known to lint or not."""
    heads = [f"{name} {name[::-1]} " * 9 for name in ("ann", "bobby", "cleopatra", "danny")]
    printed = terminal.show("lint", write(tmp_path / "log.jsonl", heads))
    assert "few tokens hit, and no fix was found" in printed
    assert "nothing" not in printed and "ostinato explain" in printed


def test_clean_requests_are_clean(terminal: Terminal, tmp_path: Path):
    log = write(tmp_path / "log.jsonl", [SYSTEM] * 20)
    assert "nothing breaks their prefixes early" in terminal.show("lint", "--strict", log)


def test_as_json_and_as_an_exit_code(terminal: Terminal, tmp_path: Path):
    log = write(tmp_path / "log.jsonl", [f"Now {n}. {SYSTEM}" for n in range(20)])
    [finding] = json.loads(terminal.show("lint", "--json", log))["findings"]
    assert finding["kind"] == "counter"
    assert finding["after"] > finding["before"]
    assert terminal.run("lint", "--strict", log).exit_code == 1


def test_a_broken_line_is_named_and_may_be_left_out(terminal: Terminal, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    log = write(path, [SYSTEM] * 4)
    path.write_text(path.read_text() + "\n{torn")
    assert "line 5" in terminal.refuse("lint", log)
    for how in ((), ("--json",)):
        result = terminal.run("lint", "--skip-broken", log, *how)
        assert result.exit_code == 0 and "line 5 left out" in result.stderr


def test_anthropic_requests_in_a_gzipped_array_are_checked(terminal: Terminal, tmp_path: Path):
    """The names of users are shown whole, and where they stand."""
    records = [
        {
            "model": "claude-sonnet-4-5",
            "max_tokens": 9,
            "system": f"The user is {('Paula', 'Grace', 'Fatima')[n % 3]} a. {SYSTEM}",
            "messages": [{"role": "user", "content": f"Who comes? {n}"}],
        }
        for n in range(20)
    ]
    path = tmp_path / "log.json.gz"
    path.write_bytes(gzip.compress(json.dumps(records).encode()))
    page = terminal.show("lint", str(path))
    assert "1. user costs" in page
    assert "after 'The user is': 'Paula', 'Grace', 'Fatima'" in page


def test_a_field_that_is_not_known_is_named_and_can_be_ignored(terminal: Terminal, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    body = {"messages": [{"role": "user", "content": "Who?", "mood": "sad"}]}
    path.write_text("\n".join([json.dumps(body)] * 3))
    refusal = terminal.refuse("lint", str(path))
    assert "line 1: messages[0].mood is not understood" in refusal
    assert "--ignore mood" in refusal
    assert "3 requests" in terminal.show("lint", str(path), "--ignore", "mood")
    assert "mood" in terminal.refuse("explain", str(path))
    assert "2 of" not in terminal.show("explain", str(path), "--ignore", "mood").splitlines()[0]


def test_a_log_that_is_too_long_is_checked_in_part_and_says_so(terminal: Terminal, tmp_path: Path):
    log = write(tmp_path / "log.jsonl", [SYSTEM] * 20)
    result = terminal.run("lint", log, "--max-text", "1KiB")
    assert result.stdout.startswith("4 requests, ")
    assert "Only the first 4 requests were checked (1KiB of prompts; --max-text" in result.stderr
    assert "max_text='much'" in terminal.refuse("lint", log, "--max-text", "much")


def test_a_template_that_only_appends_is_called_prefix_preserving(terminal: Terminal):
    """No log, no weights: the embedded model's template renders synthetic dialogues."""
    page = terminal.show("lint", "--template", "tiny-shakespeare", "--strict")
    assert "each prompt begins with the one before" in page
    assert "Prefix-preserving, as trainers need it: yes." in page
    assert "not in this template" in page


def test_a_template_that_drops_reasoning_names_the_turn_and_the_tokens(
    terminal: Terminal, tmp_path: Path
):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FAMILIES["qwen3"]
    tokenizer.save_pretrained(tmp_path)
    page = terminal.show("lint", "--template", str(tmp_path))
    assert "earlier turns are rewritten in 3 dialogues" in " ".join(page.split())
    assert re.search(
        r"tool calls with( reasoning)? +drops earlier reasoning +user message \(7\)", page
    )
    assert "<think>" in page
    strict = terminal.run("lint", "--template", str(tmp_path), "--json", "--strict")
    report = json.loads(strict.stdout)
    assert (strict.exit_code, report["append_only"]) == (1, False)
    assert report["drops_at_user_message"]


def test_a_template_that_is_broken_or_missing_is_named(terminal: Terminal, tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert "has no chat template" in terminal.refuse("lint", "--template", str(tmp_path))
    tokenizer.chat_template = "{% if %}"
    tokenizer.save_pretrained(tmp_path)
    page = terminal.show("lint", "--template", str(tmp_path))
    assert "renders no conversation" in page and "Expected an expression" in page
    assert "a log of requests, or --template" in terminal.refuse("lint")


def test_fix_prints_a_file_of_rules_that_the_server_reads(terminal: Terminal, tmp_path: Path):
    heads = [f"It is {9 + n // 60}:{n % 60:02} now. {SYSTEM}" for n in range(20)]
    printed = terminal.show("lint", "--fix", write(tmp_path / "log.jsonl", heads))
    assert "# 1 rule for 'ostinato serve --stabilise FILE'." in printed
    assert "# '9:00', '9:01', '9:02': " in printed
    path = tmp_path / "rules.toml"
    path.write_text(printed)
    [rule] = read_rules(str(path))
    assert (rule.name, rule.where, rule.put) == ("timestamp", "system", "[timestamp]")


def test_fix_without_a_rule_prints_an_empty_file_of_rules(terminal: Terminal, tmp_path: Path):
    printed = terminal.show("lint", "--fix", write(tmp_path / "log.jsonl", [SYSTEM] * 20))
    (tmp_path / "rules.toml").write_text(printed)
    assert read_rules(str(tmp_path / "rules.toml")) == ()

"""Volatile bytes of prompts: rules replace them, are bounded, and say what they did."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.errors import ConfigError
from ostinato.protocol.pattern_limits import MAX_WAYS, check_pattern
from ostinato.protocol.volatile import CHECKSUM_RULES, Rule, Stabiliser, read_rules
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.checkpoints import make_config, save_checkpoint
from tests.support.servers.prefix_probe import ENDPOINTS
from tests.support.servers.servers import serving

RULES = r"""
[[rule]]
name = "today"
where = "system"
pattern = '''Today is (\d{4}-\d\d-\d\d)\.'''
put = "some day"

[[rule]]
name = "git-state"
where = "any"
pattern = '''\d{1,4} files changed'''
put = "files changed"
"""


def settle(text: str, *rules: Rule, role: str = "system") -> str:
    settled = Stabiliser(rules).settle([{"role": role, "content": text}])
    return settled.messages[0]["content"]


def test_what_is_in_parentheses_changes_and_the_rest_is_where_it_stands():
    rule = Rule(name="today", pattern=r"Today is (\d{4}-\d\d-\d\d)\.", put="some day")
    assert settle("Born 2001-01-01. Today is 2026-11-27. Go.", rule) == (
        "Born 2001-01-01. Today is some day. Go."
    )


def test_a_pattern_without_parentheses_is_replaced_as_a_whole_wherever_it_stands():
    rule = Rule(name="hosts", where="any", pattern=r"host-[0-9a-f]{8}", put="host")
    assert settle("host-01234567 and host-89abcdef", rule, role="user") == "host and host"


def test_a_rule_reads_the_messages_of_its_role_alone():
    """A user who speaks of a day means that day."""
    rule = Rule(name="today", where="system", pattern=r"\d{4}-\d\d-\d\d")
    assert settle("On 2026-11-27?", rule, role="user") == "On 2026-11-27?"


def test_text_parts_are_settled_and_images_stay():
    rule = Rule(name="today", where="user", pattern=r"\d{4}", put="year")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,2026"}}
    parts: list[dict[str, Any]] = [{"type": "text", "text": "In 2026"}, image]
    settled = Stabiliser([rule]).settle([{"role": "user", "content": parts}])
    assert settled.messages[0]["content"] == [{"type": "text", "text": "In year"}, image]
    assert parts[0]["text"] == "In 2026", "the request itself is not changed"


def test_the_checksum_of_claude_code_is_one_of_the_rules():
    line = "x-anthropic-billing-header: cc_version=2.1.330.8fa; cc_entrypoint=cli; cch=0a1b;"
    assert settle(line + "You help.", *CHECKSUM_RULES) == (
        "x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=cli; You help."
    )
    quoted = "The line is " + line
    assert settle(quoted, *CHECKSUM_RULES) == quoted, "the first line alone, not a quotation"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a+)+b", "has no bound"),
        (r"a*", "has no bound"),
        (r"a{3,}", "has no bound"),
        (r"a{1,9999}", "at most 512 repeats"),
        (r"(?:a|b){1,40}c", "repeats a group of 2 ways"),
        (r"(?:a{0,9}){9}c", "repeats a group of 10 ways"),
        (r"a{0,99}a{0,99}b", "10000 ways"),
        (r"(?=a)b", r"group (?...)"),
        (r"(?i)b", r"group (?...)"),
        (r"(a)\1", "has no bound"),
        (r"(?:foo){e<=2}", "repeats nothing"),
        (r"(?<x>a)\g<x>", "has no bound"),
        (r"(", "is no expression"),
        (r"", "1 to 512 characters"),
        ("a" * 513, "1 to 512 characters"),
    ],
)
def test_a_pattern_that_could_be_slow_is_refused_with_the_way_out(pattern: str, reason: str):
    with pytest.raises(ConfigError, match="pattern=") as refusal:
        check_pattern(pattern)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{4}-\d\d-\d\d",
        r"[a-z]{1,64}",
        r"(?:Mon|Tues|Wednes)day",
        r"[\]a\\]{1,9}[^]b]{2}",
        r"\p{Lu}{1,8}+",
        r"(?P<sha>[0-9a-f]{7,40}+)(?:-dirty)?",
        r"a{0,63}b{0,63}",
        r"(?:ab){1,99}",
    ],
)
def test_a_bounded_pattern_is_taken(pattern: str):
    check_pattern(pattern)


def test_the_worst_text_for_the_worst_pattern_ends_in_time():
    """Almost matches everywhere: a million places, and all ways at each of them."""
    rule = Rule(name="worst", where="any", pattern=r"a{0,63}a{0,62}b")
    check_pattern(rule.pattern)
    assert MAX_WAYS >= 64 * 63
    text = "a" * 1_000_000 + "cb"
    began = time.process_time()
    settled = Stabiliser([rule], limit_s=0.001).settle([{"role": "user", "content": text}] * 50)
    assert settled.late == ("worst",)
    assert settled.messages[0]["content"] == text, "what takes too long stays as it is"
    assert time.process_time() - began < 20, "50 messages share one limit"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[[rule]]\nname = 'x'", "name and pattern are needed"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\nwhen = 'now'", "name, where, pattern and put"),
        ("[[rule]]\nname = 'X Y'\npattern = 'a'", "lower-case"),
        ("[[rule]]\nname = 'x'\npattern = 'a+'", "rule 1: pattern='a+': + has no bound"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\nwhere = 'tools'", "where='tools'"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\nput = 3", "put=3"),
        ("rules = 1", "nothing else"),
        ("rule = 1", "nothing else"),
        ("[[rule", "cannot be read"),
        ("[[rule]]\nname = 'x'\npattern = 'a'\n" * 65, "65 rules, and at most 64"),
    ],
)
def test_a_file_of_rules_is_refused_by_rule_and_value(tmp_path: Path, content: str, reason: str):
    path = tmp_path / "rules.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refusal:
        read_rules(str(path))
    assert reason in str(refusal.value)


def test_a_missing_file_of_rules_is_named():
    with pytest.raises(ConfigError, match=r"stabilise='/nowhere/rules.toml': cannot be read"):
        read_rules("/nowhere/rules.toml")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Serve a tiny model with two rules."""
    folder = tmp_path_factory.mktemp("rules")
    path = folder / "rules.toml"
    path.write_text(RULES)
    save_checkpoint(folder / "model", make_config("llama", max_position_embeddings=1024))
    llm = AsyncLLM(str(folder / "model"), dtype="float32", num_blocks=256)
    llm.engine.loaded.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    )
    state = ServerState(llm, ServerConfig(model_names=("tiny",), stabilise=str(path)))
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    llm.shutdown()


def bodies(day: str, num_files: int) -> dict[str, dict[str, Any]]:
    """Return one prompt in the words of each API."""
    system = f"Today is {day}. You help with code. You answer in one word."
    question = f"{num_files} files changed. Well?"
    chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    messages = {"system": system, "messages": [chat[1]], "max_tokens": 1}
    return {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
        "/v1/responses": {"instructions": system, "input": question, "max_output_tokens": 1},
        "/v1/messages": messages,
    }


@pytest.mark.parametrize("path", list(bodies("", 0)))
def test_the_next_day_hits_and_the_answer_says_why(http: httpx.Client, path: str):
    """Day and number of files differ; with the rules, all but the last token of the prompt hits."""
    first, second = (
        http.post(path, json={"model": "tiny", "cache_salt": path, **bodies(*state)[path]})
        for state in (("2026-11-27", 3), ("2026-11-28", 12))
    )
    assert second.status_code == 200, second.text
    assert second.headers["x-ostinato-set-aside"] == "today, git-state"
    endpoint = ENDPOINTS[path]
    assert endpoint.total(first.json()) == endpoint.total(second.json())
    assert endpoint.cached(second.json()) == endpoint.total(second.json()) - 1


def test_a_prompt_that_no_rule_names_stays_as_it_is_and_says_nothing(http: httpx.Client):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Today is 2026-11-27."}]}
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert "x-ostinato-set-aside" not in answer.headers


def test_what_was_set_aside_is_counted_by_rule_and_named_in_the_explanation(http: httpx.Client):
    def counted() -> float:
        lines = http.get("/metrics").text.splitlines()
        [line] = [x for x in lines if x.startswith('ostinato_set_aside_total{rule="today"}')]
        return float(line.split()[1])

    body = bodies("2026-12-01", 4)["/v1/chat/completions"]
    http.post("/v1/chat/completions", json={"model": "tiny", **body})
    before = counted()
    changed = {**body["messages"][0], "content": "Today is 2026-12-02. You help otherwise."}
    body["messages"][0] = changed
    answer = http.post("/v1/chat/completions", json={"model": "tiny", **body})
    assert counted() - before == 1
    explained = http.get(f"/v1/explain/{answer.json()['id']}").text
    assert "messages[0] (system), today set aside" in explained

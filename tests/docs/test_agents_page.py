"""The page of agents has a section for each that the nightly runs, with the lines it sets."""

import json
import re
from pathlib import Path

import pytest

from ostinato.protocol.volatile import Stabiliser, read_rules
from tests.agents.clients import CLIENTS, AgentClient

PAGE = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_agent_has_a_section_and_a_row(client: AgentClient):
    family = client.name.split(" ")[0] if client.name.startswith("smolagents") else client.name
    assert f"\n## {family}\n" in PAGE
    assert re.search(rf"^\| {family}.*\| yes \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_lines_to_set_are_those_of_the_nightly(client: AgentClient):
    for name, value in client.environment.items():
        if "{url}" in value and name.isupper() and not name.startswith("OSTINATO"):
            assert f"{name}={value.replace('{url}', ADDRESS)}" in PAGE, name
    for name, text in client.files.items():
        shown = text.replace("{url}", ADDRESS)
        if name.endswith(".toml"):
            assert squeezed(shown) in squeezed(PAGE)
        elif name.endswith(".yaml"):
            assert shown in PAGE
        elif name.endswith("models.json") or name.endswith("opencode.json"):
            blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
            assert json.loads(shown) in [json.loads(block) for block in blocks]


def test_the_rules_of_the_page_are_taken_and_match(tmp_path: Path):
    """Each replaces what it is for, in a message of the role that it names."""
    texts = {
        "today": ("system", "Today's date: 2026-11-28", "Today's date: see the last message"),
        "date-reminder": ("user", "<system-reminder>\nThe current date is: today.\n"
                          "</system-reminder>Hi.", "Hi."),
    }  # fmt: skip
    rules = re.findall(r"```toml[^\n]*\n(\[\[rule.*?)```", PAGE, re.DOTALL)
    (tmp_path / "rules.toml").write_text("\n".join(rules))
    read = read_rules(str(tmp_path / "rules.toml"))
    assert {rule.name for rule in read} == texts.keys()
    for role, text, settled in texts.values():
        [message] = Stabiliser(read).settle([{"role": role, "content": text}]).messages
        assert message["content"] == settled


def squeezed(text: str) -> str:
    """Return a text without empty lines."""
    return re.sub(r"\n{2,}", "\n", text)

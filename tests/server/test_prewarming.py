"""Prompts that are computed before the first request, from a file."""

import json

import pytest

from ostinato.core.errors import ConfigError
from ostinato.server.admin.prewarming import read_prewarm_file
from ostinato.server.lifecycle import warm_up
from tests.server.keyed import keyed_server

PROMPT = "All the world's a stage, and all the men and women merely players: they have exits."


def test_lines_are_computed_kept_and_published_in_their_order(tmp_path):
    """One prompt to be found, one that stays, and one that all may begin with."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": PROMPT, "tenant": "ann"},
        {"prompt": [9] * 48, "tenant": "ann", "pin": True},
        {"prompt": [8] * 48, "publish": "manual"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with keyed_server(tmp_path, {"ann": {"public": ["manual"]}}) as keyed:
        warm_up(keyed.state, read_prewarm_file(path))
        assert keyed.num_cached("ann", PROMPT) == len(PROMPT) - 1
        assert keyed.num_cached("bob", PROMPT) == 0
        assert keyed.num_cached("ann", [8] * 48 + [7]) == 48
        [lease] = keyed.administer("/admin/leases", method="GET")["leases"]
        assert (lease["tenant"], lease["num_tokens"]) == ("ann", 48)
        keyed.administer("/admin/reset", {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: the object: Invalid JSON"),
        ("[]", "line 2: the object"),
        ('{"prompt": "x", "tenent": "ann"}', "line 2: tenent"),
        ('{"tenant": "ann"}', "line 2: the object: give one of prompt and messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line: str, says: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + line)
    with pytest.raises(ConfigError) as refusal:
        read_prewarm_file(path)
    assert says in str(refusal.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        read_prewarm_file("nowhere.jsonl")


def test_what_cannot_be_kept_ends_the_start(tmp_path):
    """A tenant that is not there, and a prompt that fills no block."""
    for line, says in (
        ({"prompt": "x", "tenant": "nobody"}, "prompt 1 of the prewarm file.*no such tenant"),
        ({"prompt": "x", "tenant": "ann", "pin": True}, "prompt 1.*do not fill a block"),
    ):
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps(line))
        with keyed_server(tmp_path) as keyed, pytest.raises(ConfigError, match=says):
            warm_up(keyed.state, read_prewarm_file(path))

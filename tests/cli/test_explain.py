"""``ostinato explain``, as a user sees it."""

import json
from pathlib import Path

from ostinato import LLM, SamplingParams

from .terminal import Terminal

FIRST, SECOND = "You are a helpful assistant.", "You are A helpful assistant."
TALK = [{"role": "system", "content": "The scene is Rome."}, {"role": "user", "content": "Who?"}]


def test_two_prompts_and_a_caret_under_the_difference(terminal: Terminal):
    page = terminal.show("explain", "-p", FIRST, "-p", SECOND)
    assert page.startswith("request-1: 8 of 28 prompt tokens were cached\n")
    mine = next(line for line in page.splitlines() if line.startswith("this prompt"))
    caret = next(line for line in page.splitlines() if "^ token 8" in line)
    assert mine[caret.index("^")] == "A"
    assert "19 tokens behind the difference agree again" in page


def test_files_are_prompts(terminal: Terminal, tmp_path: Path):
    for name, text in (("a.txt", FIRST), ("b.txt", SECOND)):
        (tmp_path / name).write_text(text + "\n")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    [first, second] = terminal.show("explain", "--all", "--json", *paths).splitlines()
    assert json.loads(first)["stretches"][0]["cause"] == "never seen"
    told = json.loads(second)
    assert (told["num_cached_tokens"], told["difference"]["token"]) == (8, 8)


def test_a_log_of_requests_names_the_message(terminal: Terminal, tmp_path: Path):
    """Nothing is run: the requests are put to the cache, with their own tenants."""
    changed = [{"role": "system", "content": "The scene is Rame."}, TALK[1]]
    lines = [
        {"timestamp": "2025-03-01T10:00:00", "body": {"messages": TALK}},
        {"timestamp": "2025-03-01T10:01:00", "body": {"messages": changed}},
        {"timestamp": "2025-03-01T10:02:00", "tenant": "ann", "body": {"messages": TALK}},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    page = terminal.show("explain", "--all", "--model", "tiny-shakespeare", str(path))
    assert "differs at token 14 from line 1" in page
    assert "token 14 in messages[0] (system), line 1, column 15" in page
    assert "seen from another tenant" in page


def test_a_recorded_trace_tells_where_and_shows_no_text(terminal: Terminal, tmp_path: Path):
    with LLM(num_blocks=64) as llm:
        path = llm.start_recording(tmp_path / "run.jsonl")
        outputs = [
            llm.generate(p, SamplingParams(max_tokens=2), use_tqdm=False)[0]
            for p in (FIRST * 2, FIRST + SECOND)
        ]
        live = [llm.explain(output) for output in outputs]
        llm.stop_recording()
    page = terminal.show("explain", "--all", str(path))
    assert "differs at token 36 from 0, the nearest prompt" in page
    assert "pseudonyms instead of tokens" in page
    assert "helpful" not in page
    told = map(json.loads, terminal.show("explain", "--all", "--json", str(path)).splitlines())
    for replayed, explanation in zip(told, live, strict=True):
        assert [s["stop"] for s in replayed["stretches"]] == [s.stop for s in explanation.stretches]


def test_what_cannot_be_explained_is_refused(terminal: Terminal, tmp_path: Path):
    assert "nothing to explain" in terminal.refuse("explain")
    assert "nowhere.txt" in terminal.refuse("explain", str(tmp_path / "nowhere.txt"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [{"content": "no role"}]}\n')
    assert "line 1: messages[0] is no object with a 'role'" in terminal.refuse(
        "explain", str(broken)
    )
    assert "explain it without other" in terminal.refuse("explain", str(broken), "-p", "more")

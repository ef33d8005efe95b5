"""``ostinato explain``, as a user sees it."""

import json
from pathlib import Path

import pytest

from ostinato import LLM, SamplingParams
from tests.cli.terminal import Terminal
from tests.server.keyed import keyed_server

FIRST, SECOND = "You are a helpful assistant.", "You are A helpful assistant."
TALK = [{"role": "system", "content": "The scene is Rome."}, {"role": "user", "content": "Who?"}]


def test_two_prompts_and_a_caret_under_the_difference(terminal: Terminal):
    page = terminal.show("explain", "-p", FIRST, "-p", SECOND)
    assert page.startswith("request-1: 8 of 28 prompt tokens were cached\n")
    mine = next(line for line in page.splitlines() if line.startswith("this prompt"))
    caret = next(line for line in page.splitlines() if "^ token 8" in line)
    assert mine[caret.index("^")] == "A"
    assert "The 19 tokens after it match but cannot hit" in page


def test_files_are_prompts(terminal: Terminal, tmp_path: Path):
    for name, text in (("a.txt", FIRST), ("b.txt", SECOND)):
        (tmp_path / name).write_text(text + "\n")
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    [first, second] = terminal.show("explain", "--all", "--json", *paths).splitlines()
    assert json.loads(first)["spans"][0]["reason"] == "never seen"
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


def test_what_a_chat_template_leaves_out_is_compared_as_well(terminal: Terminal, tmp_path: Path):
    """The embedded model's template knows neither tools nor calls."""
    tool = {"name": "look", "input_schema": {}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "door"}}
    asked = [TALK[1], {"role": "assistant", "content": [call]}, TALK[1]]
    other = [TALK[1], {"role": "assistant", "content": [call | {"input": {"at": "wall"}}]}, TALK[1]]
    path = tmp_path / "log.jsonl"
    records = [
        {"system": "Rome.", "messages": messages, "tools": [tool | {"name": name}]}
        for messages, name in ((asked, "look"), (other, "look"), (other, "hear"))
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    page = terminal.show("explain", "--all", "--model", "tiny-shakespeare", str(path))
    assert page.count("differs at token") == 2


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
    assert "differs at token 36 from request 0, the nearest prompt" in page
    assert "pseudonyms instead of tokens" in page
    assert "helpful" not in page
    told = map(json.loads, terminal.show("explain", "--all", "--json", str(path)).splitlines())
    for replayed, explanation in zip(told, live, strict=True):
        assert [s["stop"] for s in replayed["spans"]] == [s.stop for s in explanation.spans]


def test_two_short_prompts_that_agree_in_most_of_their_letters_are_compared(terminal: Terminal):
    """What was copied from the other prompt cannot be called never seen."""
    page = terminal.show("explain", "-p", "Enter ROMEO. He waits.", "-p", "Enter ROMEO. She waits.")
    assert "13..22  computed  differs at token 13 from request-0" in page
    assert "never seen" not in page
    page = terminal.show("explain", "-p", "Enter ROMEO.", "-p", "Exeunt all but ten of them.")
    assert "never seen: no remembered prompt continues like this" in page


def test_one_request_of_a_log_or_a_recording_is_chosen_by_its_number(
    terminal: Terminal, tmp_path: Path
):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"prompt": p}) for p in (FIRST, SECOND, FIRST)))
    page = terminal.show("explain", str(log), "--request", "2", "-r", "line 3")
    assert [line for line in page.splitlines() if line.endswith("were cached")] == [
        "line 2: 2 of 8 prompt tokens were cached",
        "line 3: 7 of 8 prompt tokens were cached",
    ]
    assert "log.jsonl has line 1 to line 3" in terminal.refuse("explain", str(log), "-r", "4")
    alone = terminal.show("explain", str(log))
    assert alone.startswith("line 3: 7 of 8 prompt tokens") and "line 2:" not in alone
    assert alone in terminal.show("explain", str(log), "--all")
    log.write_text(log.read_text() + "\n{torn")
    assert "log.jsonl, line 4" in terminal.refuse("explain", str(log))
    result = terminal.run("explain", str(log), "--skip-broken")
    assert "line 4 left out" in result.stderr and result.stdout.startswith("line 3:")
    with LLM(num_blocks=64, record_trace=tmp_path / "run.jsonl") as llm:
        llm.generate([FIRST * 2, FIRST + SECOND], SamplingParams(max_tokens=2), use_tqdm=False)
    page = terminal.show("explain", str(tmp_path / "run.jsonl"), "-r", "1")
    assert page.startswith("request 1: ") and "from request 0" in page


def test_a_request_of_a_running_server_is_explained_to_its_sender(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = "You are a helpful assistant, and a patient one. Answer at once."
    with keyed_server(tmp_path) as keyed:
        names = [keyed.complete("ann", text)["id"] for text in (long, "y" + long[1:])]
        monkeypatch.setenv("OSTINATO_URL", keyed.url)
        mine = ("explain", "--key", keyed.keys["ann"], "--request")
        page = terminal.show(*mine, names[1])
        assert f"differs at token 0 from {names[0]}-0, the nearest prompt" in page
        assert "the nearest  You are a helpful" in page
        assert "             ^ token 0 in" in page
        [told] = map(json.loads, terminal.show(*mine, names[1], "--json").splitlines())
        answer = keyed.ask("ann", f"/v1/explain/{names[1]}", method="GET").json()
        assert told == {name: answer[name] for name in told}
        theirs = ("explain", "--key", keyed.keys["bob"], "-r", names[1])
        assert f"request '{names[1]}' is not remembered" in terminal.refuse(*theirs)
        assert "give --key" in terminal.refuse("explain", "-r", names[1])
    assert "no server answers" in terminal.refuse("explain", "-r", names[1])
    assert "do not give prompts" in terminal.refuse("explain", "-r", names[1], "-p", "One")


def test_causes_are_named_for_requests_of_a_running_server(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each is brought about over HTTP, and asked for from a shell."""
    settings = {"num_blocks": 24, "block_size": 16, "seal_tails": False}
    with keyed_server(tmp_path, **settings, eviction_policy="lru") as keyed:
        monkeypatch.setenv("OSTINATO_URL", keyed.url)

        def reasons(prompt: str, **body: object) -> set[str]:
            name = keyed.complete("ann", prompt, **body)["id"]
            shown = ("explain", "--key", keyed.keys["ann"], "-r", name)
            [told] = map(json.loads, terminal.show(*shown, "--json").splitlines())
            page = terminal.show(*shown)
            assert page.startswith(f"{name}")
            return {s["reason"] for s in told["spans"] if "reason" in s}

        text = "When shall we three meet again, in thunder, lightning, or in rain?"
        assert reasons(text) == {"never seen"}
        assert reasons("X" + text[1:]) == {"differs"}
        assert "block boundary" in reasons(text + " And where?")
        assert "other tenant" not in reasons(text, cache_salt="mine")
        for number in range(12):  # more than the pool holds
            keyed.complete("ann", chr(ord("a") + number) * 120)
        assert "evicted" in reasons(text)
        keyed.administer("/admin/reset", {})
        assert "removed" in reasons(text)


def test_what_cannot_be_explained_is_refused(terminal: Terminal, tmp_path: Path):
    assert "nothing to explain" in terminal.refuse("explain")
    assert "nowhere.txt" in terminal.refuse("explain", str(tmp_path / "nowhere.txt"))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [{"content": "no role"}]}\n')
    assert "line 1: messages[0].role is missing" in terminal.refuse("explain", str(broken))
    assert "explain it without other" in terminal.refuse("explain", str(broken), "-p", "more")

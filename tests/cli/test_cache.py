"""`ostinato cache` and `ostinato keys`, against a real server with keys."""

import json
import re

import pytest

from ostinato.cli.cache import read_seconds
from ostinato.cli.output.cache_tables import draw_audit, draw_stats, draw_tiers
from ostinato.core.errors import ConfigError
from ostinato.engine.tiers.tiered_cache import TierCounts
from ostinato.server.access.keys import read_keys
from ostinato.tiers.port import TierStats
from tests.cli.terminal import Terminal, drawn
from tests.server.keyed import Keyed, keyed_server

PROMPT = "Good night, good night! Parting is such sweet sorrow, that I shall say good night."


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """Serve two tenants that may begin with what is public, and record."""
    folder = tmp_path_factory.mktemp("cache")
    public = {"public": ["*"]}
    with keyed_server(folder, {"ann": public, "bob": public}, traces=folder) as server:
        yield server


@pytest.fixture
def cache(keyed: Keyed, terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    """Run ``ostinato cache`` as the administrator, on a cold cache."""
    keyed.administer("/admin/reset", {})
    monkeypatch.setenv("OSTINATO_URL", keyed.url)
    monkeypatch.setenv("OSTINATO_ADMIN_KEY", keyed.keys["ops"])
    return lambda *args: terminal.show("cache", *args)


def test_a_prompt_is_warmed_kept_listed_and_released(cache, keyed: Keyed, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    warmed = cache("prewarm", f"@{tmp_path / 'prompt.txt'}", "--tenant", "ann")
    assert "82 tokens are cached; 82 of them were computed" in warmed
    assert keyed.num_cached("ann", PROMPT) == 81

    kept = cache("lease", PROMPT, "--tenant", "ann", "--ttl", "5m")
    assert kept.startswith("accepted: lease ") and "keeps 80 tokens" in kept
    pinned = json.loads(cache("pin", PROMPT, "--tenant", "ann", "--json"))
    assert pinned["status"] == "accepted"
    listed = cache("leases")
    assert listed.count("ann") == 2 and "never" in listed
    assert re.search(r"\b(300|2\d\d) s", listed), "five minutes, less what a busy machine took"
    for lease in json.loads(cache("leases", "--json"))["leases"]:
        assert "released" in cache("release", str(lease["lease_id"]))
    assert "Nothing is kept." in cache("leases")
    assert cache("pin", "never sent " * 4, "--tenant", "ann").startswith("rejected (no whole block")


def test_statistics_and_the_heaviest_prefixes_are_drawn(cache, keyed: Keyed):
    assert "Nothing is cached." in cache("heaviest")
    for _ in range(2):
        keyed.complete("ann", PROMPT)
    drawn = cache("heaviest", "--most", "3", "--tenant", "ann")
    assert "Good night, good night! Parting" in drawn and "ann" in drawn
    stats = cache("stats")
    assert "512 blocks" in stats and "ann" in stats and "all" in stats
    assert json.loads(cache("stats", "--json"))["tenants"]["ann"]["num_requests"] >= 2


def test_tiers_are_drawn_with_what_was_loaded_and_written(cache):
    assert "There are no tiers" in cache("tiers")
    counts = TierCounts(
        (TierStats("disk", "/var/kv", "read-only", "no space", 12, 0, 5 * 2**30, 2**34),),
        {"disk": 4096}, 0.25, {"checksum": 1}, num_cheaper=3, stores={"stored": 12},
    )  # fmt: skip
    shown = drawn(draw_tiers, counts.as_dict(), width=120)
    assert shown.startswith("disk is read-only: no space (/var/kv)\n")
    assert "5 GiB" in shown and "4,096" in shown
    assert "Loading took 250 ms; computing was cheaper 3 times" in shown
    assert "checksum 1\n" in shown and "stored 12\n" in shown


def test_estimates_are_drawn_when_there_are_some(cache):
    """A row for each size and policy, the cache's own policy first."""
    answer = json.loads(cache("stats", "--json"))
    assert "Would hit" not in drawn(draw_stats, answer | {"ghosts": []})
    row = {"num_blocks": 1_024, "hit_ratio": 0.4321, "num_requests": 5_000}
    row |= {"low": 0.4123, "high": 0.4519, "num_sampled_blocks": 700, "num_later_requests": 812}
    answer["ghosts"] = [
        {"memory": 1.0, "policy": "lru", **row},
        {"memory": 2.0, "policy": "lru", **row},
    ]
    shown = drawn(draw_stats, answer)
    assert "Would hit" in shown and "1,024" in shown and "43.2%" in shown and "5,000" in shown
    assert "41.2% and 45.2%" in shown and "812" in shown
    assert shown.index("2 x") < shown.index("1 x")


def test_audits_are_drawn_where_there_are_some(cache):
    assert "start the server with --audit-share" in cache("audit")
    answer = json.loads(cache("audit", "--json"))
    finding = {"num_tokens": 64, "first_token": 53, "layers": [2, 3], "num_removed": 5}
    finding |= {"cached_blocks": [[7, 8, 9, 11]], "computed_blocks": [0, 1, 2, 3]}
    counts = {"share": 0.1, "num_same": 1_200, "num_different": 1, "num_removed": 5}

    shown = drawn(draw_audit, answer | counts | {"findings": [finding]})

    assert "1,200 hits" in shown and "1 differ" in shown and "5 blocks quarantined" in shown
    assert "7 8 9 11" in shown and "2 3" in shown and "53" in shown


def test_a_prefix_is_published_listed_and_taken_back(cache, keyed: Keyed):
    assert "80 tokens are public as 'manual'" in cache("publish", "manual", PROMPT)
    assert "manual" in cache("public") and "yes" in cache("public")
    assert keyed.num_cached("bob", PROMPT) == 80
    assert "'manual' is no longer public" in cache("unpublish", "manual")
    assert "Nothing is public." in cache("public")


def test_erasing_and_resetting_say_what_is_gone(cache, keyed: Keyed):
    keyed.complete("ann", PROMPT)
    receipt = cache("erase", "ann")
    assert "blocks" in receipt and "zeroed slots" in receipt
    assert keyed.num_cached("ann", PROMPT) == 0
    assert "The cache is empty." in cache("reset")


def test_a_recording_is_started_and_stopped(cache, keyed: Keyed):
    started = cache("record", "start", "traffic.jsonl")
    keyed.complete("ann", PROMPT)
    stopped = cache("record", "stop")
    path = stopped.removeprefix("Recorded: ").strip()
    assert path in started.replace("\n", "")
    with open(path, "rb") as file:
        assert PROMPT.encode() not in file.read()


def test_refusals_are_one_line_that_says_what_to_do(
    cache, keyed: Keyed, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    assert "no such lease" in terminal.refuse("cache", "release", "99999")
    assert "no such tenant" in terminal.refuse("cache", "erase", "nobody")
    assert "ttl='soon'" in terminal.refuse("cache", "lease", PROMPT, "--ttl", "soon")
    assert "cannot be read" in terminal.refuse("cache", "prewarm", "@/nowhere")
    monkeypatch.setenv("OSTINATO_ADMIN_KEY", keyed.keys["ann"])
    assert "does not administer" in terminal.refuse("cache", "stats")
    monkeypatch.delenv("OSTINATO_ADMIN_KEY")
    assert "OSTINATO_ADMIN_KEY" in terminal.refuse("cache", "stats")
    monkeypatch.setenv("OSTINATO_URL", "http://127.0.0.1:9")
    assert "ostinato serve" in terminal.refuse("cache", "stats")


@pytest.mark.parametrize(
    ("text", "seconds"), [("300", 300), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("2d", 172800)]
)
def test_durations_are_read_with_their_units(text: str, seconds: float):
    assert read_seconds("ttl", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5m", "inf", "nan", "5 weeks"])
def test_what_is_no_duration_is_refused(text: str):
    with pytest.raises(ConfigError, match="ttl="):
        read_seconds("ttl", text)


def test_a_new_key_is_printed_alone_so_that_a_script_can_take_it(terminal: Terminal, tmp_path):
    path = str(tmp_path / "keys.json")
    made = terminal.run("keys", "new", "acme", "-f", path, "--quota", "40", "--public", "manual")
    assert made.exit_code == 0 and made.stdout.startswith("sk-ostinato-")
    assert "copy it now" in made.stderr
    keys = read_keys(path)
    assert keys.owner_of(made.stdout.strip()) == "acme"
    assert (keys.tenants["acme"].quota, keys.tenants["acme"].public) == (40, ["manual"])
    terminal.run("keys", "new", "ops", "-f", path, "--administers")
    drawn = terminal.show("keys", "list", "-f", path)
    assert "acme" in drawn and "40" in drawn and "yes" in drawn
    assert "sha256" not in drawn
    assert "guaranteed=99 is above" in terminal.refuse(
        "keys", "new", "acme", "-f", path, "--guaranteed", "99"
    )
    assert "cannot be read" in terminal.refuse("keys", "list", "-f", str(tmp_path / "none.json"))


def test_a_tenant_in_brackets_is_listed_by_its_whole_name(terminal: Terminal, tmp_path):
    """Rich would take ``[bold]`` for markup and drop it, and fail at ``[/x]``."""
    path = str(tmp_path / "keys.json")
    for tenant in ("[bold]ann", "[/x]bob"):
        assert terminal.run("keys", "new", tenant, "-f", path).exit_code == 0
    drawn = terminal.show("keys", "list", "-f", path)
    assert "[bold]ann" in drawn and "[/x]bob" in drawn

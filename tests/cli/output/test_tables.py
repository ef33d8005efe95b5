"""No table of the command line cuts a figure in a terminal of 80 columns."""

import json
import re
from pathlib import Path

import pytest

from ostinato.cli.output.cache_tables import draw_heaviest, draw_stats, draw_tiers
from ostinato.cli.output.tables import FigureTable
from tests.cli.terminal import Terminal, drawn
from tests.docs.reading import ROOT

LARGE = 123_456_789_012


def printed(*things: object) -> str:
    return drawn(lambda console, shown: console.print(*shown), things)


def test_columns_that_do_not_fit_follow_in_another_part():
    """Each part begins with the first column."""
    table = FigureTable(has_rule=True)
    for heading in ("policy", *(f"{n} blocks" for n in range(1_000_000, 1_000_012))):
        table.add_column(heading, justify="right")
    table.add_row("reuse_hazard", *(f"{n}.25%" for n in range(12)))
    text = printed(table)

    assert [float(n) for n in re.findall(r"(\d+\.25)%", text)] == [n + 0.25 for n in range(12)]
    assert text.count("reuse_hazard") == text.count("policy") > 1
    assert max(map(len, text.splitlines())) <= 80


def test_a_path_that_is_wider_than_the_terminal_leaves_room_for_its_figures():
    """It is folded; the figures beside it stand in the same part."""
    table = FigureTable()
    table.add_column("Packed weights of", overflow="fold")
    for heading in ("On disk", "Last used"):
        table.add_column(heading, justify="right")
    path = "/home/reader/" + "a-long-name" * 9
    table.add_row(path, "93.8 MiB", "2026-05-01 12:00")
    text = printed(table)

    assert {"93.8", "MiB", "2026-05-01", "12:00"} <= set(text.split())
    assert path in "".join(re.findall(r"^ (\S+)", text, re.MULTILINE))
    assert text.count("Packed weights of") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_every_table_of_the_command_line_is_such_a_table():
    """Grids have no figures that a narrow terminal could cut."""
    for path in (ROOT / "src/ostinato/cli").rglob("*.py"):
        made = re.findall(r"(?<!Figure)\bTable\(", path.read_text(encoding="utf-8"))
        assert path.name == "tables.py" or not made, path.name


@pytest.mark.parametrize("tenant", ["acme", "a name of forty letters, blanks included."])
def test_the_tables_of_a_server_show_whole_figures(tenant: str):
    counts = dict.fromkeys(
        ("num_requests", "query_tokens", "shared_tokens", "copied_tokens"), LARGE
    ) | {"hit_ratio": 0.963}
    ghost = {"memory": 1.5, "policy": "reuse_hazard", "num_blocks": LARGE, "hit_ratio": 0.963,
             "low": 0.5, "high": 0.7, "num_requests": LARGE,
             "num_later_requests": LARGE}  # fmt: skip
    stats = {"blocks": {"free": 1}, "states": None, "lookups": counts, "num_leased_blocks": 1,
             "num_running": 1, "num_waiting": 1, "evicted_blocks": 1, "tenants": {tenant: counts},
             "ghosts": [ghost]}  # fmt: skip
    prefix = {"head": "To be, or not to be, that is the question", "branch": "x", "public": None,
              "tenant": tenant, "num_tokens": LARGE, "num_hits": LARGE, "saved_tokens": LARGE,
              "age_s": 5.0}  # fmt: skip
    tier = {"tier": "disk", "state": "on", "reason": "", "where": "/x", "num_extents": LARGE,
            "num_bytes": LARGE, "limit_bytes": LARGE, "leased_bytes": LARGE,
            "written_bytes": LARGE}  # fmt: skip
    tiers = {"tiers": [tier], "loaded_tokens": {"disk": LARGE}, "load_seconds": 1.0,
             "num_cheaper": 1, "load_faults": {}, "stores": {}}  # fmt: skip
    text = drawn(draw_stats, stats) + drawn(draw_tiers, tiers)
    text += drawn(draw_heaviest, {"prefixes": [prefix]})

    assert text.count(f"{LARGE:,}") == 2 * 4 + 3 + 3 + 2
    assert text.count("96.3%") == 3


def test_replays_of_large_traces_show_whole_shares(tmp_path: Path, terminal: Terminal):
    """Sizes as counts and as memory, more of them than 80 columns hold."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 512 * 41, "output_length": 9,
         "hash_ids": [*range(n % 7 * 1000, n % 7 * 1000 + 40), 10**6 + n]}
        for n in range(60)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    shares = terminal.show("simulate", str(path), "--model", "smollm2", "--json")
    text = terminal.show("simulate", str(path), "--model", "smollm2")

    assert "…" not in text
    for ratios in json.loads(shares)["hit_ratio"].values():
        assert all(f"{ratio:.1%}" in text for ratio in ratios)

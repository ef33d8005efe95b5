"""A conversation that returns after a restart, as its user and an administrator see it."""

from collections.abc import Iterator

import pytest

from tests.cli.terminal import Terminal
from tests.server.keyed import Keyed, keyed_server

FIRST = "You are a helpful assistant, and a patient one. Who wrote Romeo and Juliet?"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[Keyed]:
    """Serve a prompt, end the server, and start it again."""
    folder = tmp_path_factory.mktemp("restart")
    disk = {"kv_disk": folder / "kv", "kv_disk_bytes": 2**26}
    with keyed_server(folder, **disk) as keyed:
        keyed.complete("ann", FIRST)
    with keyed_server(folder, **disk) as keyed:
        yield keyed


@pytest.fixture
def cache(keyed: Keyed, terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    """Run ``ostinato cache`` as the administrator."""
    monkeypatch.setenv("OSTINATO_URL", keyed.url)
    monkeypatch.setenv("OSTINATO_ADMIN_KEY", keyed.keys["ops"])
    return lambda *args: terminal.show("cache", *args)


def row_of(tier: str, shown: str) -> list[str]:
    """Return the words of a tier's row."""
    [row] = [line for line in shown.splitlines() if line.startswith(f" {tier} ")]
    return row.split()


def test_what_was_loaded_is_in_the_usage_and_explained(keyed: Keyed, terminal: Terminal, cache):
    answer = keyed.complete("ann", FIRST + " And when?")
    details = answer["usage"]["prompt_tokens_details"]
    assert details["disk_tokens"] == details["cached_tokens"] == 64
    page = terminal.show("explain", "--key", keyed.keys["ann"], "--request", answer["id"])
    assert " 0..63  loaded    loaded from the disk\n" in page
    assert row_of("disk", cache("tiers"))[-1] == "64"


def test_an_erased_tier_is_shown_as_it_is_now(keyed: Keyed, cache):
    """Not the previous reading."""
    keyed.complete("ann", FIRST)
    assert "): 2 extents, " in cache("erase", "ann")
    assert row_of("disk", cache("tiers"))[1] == "0"

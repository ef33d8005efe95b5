"""What operators see: the page in a browser, the commands, and the process's beginning and end."""

import re
import signal
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from tests.cli.terminal import Terminal, terminal  # noqa: F401
from tests.support.servers.browsers import chromium
from tests.support.servers.served_process import Served, served


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    """Route to a worker that was not started."""
    with served("--worker", "http://127.0.0.1:9,name=nowhere", command="route") as process:
        assert httpx.post(f"{process.url}/v1/completions", json={"prompt": "x"}).status_code == 503
        yield process


def test_the_page_shows_workers_their_state_and_decisions(router: Served):
    with chromium() as browser:
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(router.url)
        row = page.locator("#workers tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text(re.compile("nowhere.*cannot be reached.*guessed"))
        expect(page.locator("#decisions tr").first).to_contain_text("failed")
        expect(page.locator("#policy")).to_have_text("cache_state")
        expect(page.locator("#key-panel input")).to_be_hidden()  # of the server's page
        assert problems == []


def test_status_and_explain_ask_a_running_router(
    router: Served,
    terminal: Terminal,  # noqa: F811
):
    terminal.columns = 200
    assert "nowhere" in terminal.show("route", "status", "--url", router.url)
    told = terminal.show("route", "explain", "To be, or not to be", "--url", router.url)
    assert told.startswith("nowhere by cache_state")
    assert "no such decision" in terminal.refuse("route", "explain", "999", "--url", router.url)
    refused = terminal.refuse("route", "--worker", "ftp://x")
    assert "must be http://host:port" in refused
    assert "can be reached from other machines" in terminal.refuse("route", "--host", "0.0.0.0")


def test_status_waits_for_workers_and_says_how_a_router_is_started(
    router: Served,
    terminal: Terminal,  # noqa: F811
):
    """A worker that never answers is shown when the time is up."""
    waited = terminal.show("route", "status", "--wait", "0.3", "--url", router.url)
    assert "nowhere" in waited
    gone = terminal.refuse("route", "status", "--wait", "0.1", "--url", "http://127.0.0.1:9")
    assert "start one with 'ostinato route'" in gone


def test_a_router_process_says_whether_it_is_ready_and_ends_on_sigterm():
    with served("--worker", "http://127.0.0.1:9,name=gone", command="route") as process:
        assert httpx.get(f"{process.url}/health").status_code == 200
        assert httpx.get(f"{process.url}/ready").json() == {"status": "no worker is well"}
        process.signal(signal.SIGTERM)
        assert process.wait() == 0

"""The scripted hour of ``scripts/hour_of_traffic.py``, and what the page shows after it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ostinato import AsyncLLM
from ostinato.server.state import ServerState
from tests.support.servers.browsers import chromium
from tests.support.servers.servers import serving

ROOT = Path(__file__).parents[2]


def load():
    """Import the script."""
    path = ROOT / "scripts" / "hour_of_traffic.py"
    spec = importlib.util.spec_from_file_location("hour_of_traffic", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_hour_is_always_the_same_and_has_all_kinds_of_callers():
    script = load()
    calls = script.hour()
    assert calls == script.hour()
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    assert calls[0].at_s >= 0 and calls[-1].at_s <= script.HOUR_S
    assert {call.tenant for call in calls} == {"desk", "chat", "crowd", "batch"}
    assert 300 < len(calls) < 500
    assert max(len(call.prompt) + call.max_tokens for call in calls) < 2048


@pytest.mark.nightly
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_after_the_hour_the_page_shows_everything(theme: str):
    """Every figure has a value, every picture a mark, every list a line."""
    llm = AsyncLLM("tiny-shakespeare", num_blocks=1000)
    with serving(ServerState(llm)) as url, chromium() as browser:
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/hour_of_traffic.py", "--url", url, "--seconds", "30"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "368 of 368 calls answered" in done.stdout, done.stdout + done.stderr
        view = browser.new_page(color_scheme=theme)
        view.goto(url)
        view.click("#run")
        view.wait_for_selector("#tokens .computed")
        for name in ("hit-ratio", "saved", "cold", "warm", "speedup", "requests", "savings-share"):
            assert any(map(str.isdigit, view.locator(f"#{name}").text_content())), name
        for origin in ("cached", "copied", "waited", "computed"):
            assert view.locator(f"#origins path.{origin}").get_attribute("d"), origin
        assert view.locator("#first circle").count() > 100
        assert view.locator("#prefixes tbody tr").count() == 14
        expect(view.locator("#tenants tbody tr")).to_have_count(5)  # the playground has none
        assert "evictable" in view.locator("#blocks-text").text_content()
    llm.shutdown()

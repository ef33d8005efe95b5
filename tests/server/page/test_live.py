"""What the page shows while the server works: figures, a chat, explanations, blocks."""

import json
import re
from array import array

from playwright.sync_api import expect

from ostinato import AsyncLLM
from ostinato.observe.introspection import BlockMap, BlockState
from ostinato.server.access.callers import Caller
from ostinato.server.page.state import lay_out_blocks
from ostinato.server.state import ServerState
from ostinato.server.telemetry.observer import salt_label
from tests.server.page.calls import complete
from tests.support.servers.servers import await_idle, serving


def test_figures_follow_the_traffic_without_a_reload(open_url, view):
    """Two equal prompts of 41 letters: 40 are found by the second, one is computed (law 4)."""
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    expect(view.locator("#saved")).to_have_text("0")
    for _ in range(2):
        complete(open_url, "What light through yonder window breaks?!", cache_salt="live")
    expect(view.locator("#saved")).to_have_text("40")
    expect(view.locator("#hit-ratio")).to_have_text("48.8%")
    expect(view.locator("#cold-count")).to_have_text("1")
    expect(view.locator("#warm-count")).to_have_text("1")
    expect(view.locator("#prefixes tbody tr").first).to_contain_text("What light through")
    expect(view.locator("#origins-text")).to_contain_text("Of 82 prompt tokens")
    expect(view.locator("#origins path.cached")).to_have_attribute("d", re.compile("^M"))
    expect(view.locator("#generated path")).to_have_attribute("d", re.compile("^M"))
    expect(view.locator("#kv path.evictable")).to_have_attribute("d", re.compile("^M"))
    expect(view.locator("#rate-detail")).to_have_text("4 in all")
    expect(view.locator("#gap-detail")).to_have_text(re.compile("95%: .*s · 99%: .*s"))
    for chart in ("origins", "first", "generated", "gaps", "queue", "kv"):
        assert view.locator(f"#{chart}-scale span").count() >= 2, f"{chart} has no y axis"
    assert view.locator("#first circle").count() == 2
    expect(view.locator("#tenants tbody")).to_contain_text(salt_label("live"))


def test_a_pause_stops_the_figures_and_the_same_button_lets_them_go_on(open_url, view):
    asked = list[str]()
    view.clock.install()
    view.goto(open_url)
    expect(view.locator("#requests")).to_have_text("0")
    view.click("#pause")
    expect(view.locator("#status")).to_have_text("paused")
    complete(open_url, "abc")
    view.on("request", lambda request: asked.append(request.url))
    view.clock.run_for(10_000)
    assert asked == []
    expect(view.locator("#requests")).to_have_text("0")
    view.click("#pause")
    expect(view.locator("#requests")).to_have_text("1")


def test_a_server_that_ends_is_said_to_be_gone(llm, view):
    with serving(ServerState(llm)) as url:
        view.goto(url)
        expect(view.locator("#status")).to_have_text("live")
        view.route("**/ui/state", lambda route: route.abort())
        expect(view.locator("#status")).to_have_text("not connected")
        view.unroute("**/ui/state")
        expect(view.locator("#status")).to_have_text("live")
        view.goto("about:blank")


def test_what_clients_write_stays_text(open_url, view):
    """A prompt made of markup is shown letter by letter, and nothing of it runs."""
    for _ in range(2):
        complete(open_url, "<img src=x onerror=alert(1)> twice.")
    view.goto(open_url)  # the model has no letter "<": its unknown token looks like markup itself
    expect(view.locator("#prefixes tbody")).to_contain_text("<unk>img src<unk>x onerror")
    assert view.locator("main img").count() == 0


def test_a_chat_streams_and_each_turn_leads_to_its_explanation(open_url, view):
    """The second turn finds the first; Escape leads back to the plain address."""

    def shorten(route) -> None:
        body = {**json.loads(route.request.post_data), "max_tokens": 8}
        route.continue_(post_data=json.dumps(body))

    view.route("**/v1/chat/completions", shorten)
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    for number, text in enumerate(("Good morrow, cousin.", "And to thee?"), 1):
        view.fill("#chat-text", text)
        view.keyboard.press("Enter")
        expect(view.locator(".assistant .note a")).to_have_count(number)
    note = view.locator(".assistant .note").last
    cached, total = map(int, re.findall(r"\d+", note.text_content())[:2])
    assert 0 < cached < total
    assert view.locator(".assistant .said").first.text_content()

    note.locator("a").click()
    expect(view.locator("#explanation-title")).to_have_text(
        f"{cached} of {total} prompt tokens were cached"
    )
    assert view.locator("#explanation-list li").count() >= 2
    view.keyboard.press("Escape")
    expect(view.locator("#explanation")).to_be_hidden()
    expect(view).to_have_url(f"{open_url}/")
    expect(view.locator("#ended tbody a")).to_have_count(2)


def test_a_cell_of_a_large_pool_says_how_its_blocks_are_divided(state):
    """131,072 blocks in 1,024 cells of 128; the first cell is half evictable."""
    owners = array("i", [0] * 64 + [-1] * (2**17 - 64))
    drawn = BlockMap(bytearray([BlockState.EVICTABLE] * 64) + bytes(2**17 - 64), owners, [b""])

    found = lay_out_blocks(state, drawn, Caller("root", "", may_administer=True))

    assert (found["per_cell"], len(found["states"])) == (128, 1024)
    assert found["mixes"][0] == [64, 0, 0, 64] and found["mixes"][1] == [128, 0, 0, 0]
    assert found["owners"][:2] == [0, -1] and found["states"][:2] == "30"
    assert found["counts"] == {"unused": 2**17 - 64, "private": 0, "held": 0, "evictable": 64}


def test_tiers_are_shown_with_what_they_hold(view, tmp_path):
    disk = {"kv_disk": tmp_path / "kv", "kv_disk_bytes": 2**26}
    llm = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=64, **disk)
    prompt = "ROMEO:\nBut, soft! what light through yonder window breaks?"
    with serving(ServerState(llm)) as url:
        for _ in range(2):
            complete(url, prompt)
        view.goto(url)
        row = view.locator("#tiers tbody tr")
        expect(row).to_contain_text("disk")
        expect(row).to_contain_text("of 64 MiB")
        expect(row.locator(".pill")).to_have_attribute("data-kind", "live")
        await_idle(llm)
    llm.shutdown()


def test_a_pool_alone_shows_no_tiers(open_url, view):
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    expect(view.locator("#tiers-card")).to_be_hidden()

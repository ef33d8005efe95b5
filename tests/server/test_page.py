"""The page in a real browser, against the real server: live, by keyboard, dark, with keys."""

import json
import re
from array import array
from collections.abc import Iterator, Mapping

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from ostinato import AsyncLLM
from ostinato.lab.savings import Workload, by_token
from ostinato.observe.introspection import BlockMap, BlockState
from ostinato.server.callers import Caller
from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError
from ostinato.server.page_state import lay_out_blocks
from ostinato.server.state import ServerState
from ostinato.server.tenant_usage import salt_label
from tests.support.browsers import chromium
from tests.support.servers import await_idle, serving


class Keys:
    """Three keys: of two tenants and of the administrator."""

    CALLERS: Mapping[str, Caller] = {
        "Bearer key-of-ann": Caller("ann", "salt of ann"),
        "Bearer key-of-bob": Caller("bob", "salt of bob"),
        "Bearer key-of-root": Caller("root", "salt of root", may_administer=True),
    }

    def identify(self, headers: Mapping[str, str]) -> Caller:
        caller = self.CALLERS.get(headers.get("authorization", ""))
        if caller is None:
            raise ApiError(401, "no such key", code="invalid_api_key")
        return caller


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=160, block_size=8)
    yield engine
    await_idle(engine)
    engine.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_url(llm: AsyncLLM) -> Iterator[str]:
    """Serve without keys; the cache is empty and nothing was counted."""
    with serving(ServerState(llm)) as url:
        yield url


@pytest.fixture
def locked_url(llm: AsyncLLM) -> Iterator[str]:
    """Serve with keys."""
    with serving(ServerState(llm, ServerConfig(), Keys())) as url:
        yield url


@pytest.fixture
def view(browser: Browser) -> Iterator[Page]:
    """Open a tab in which nothing may go wrong unheard, and nothing be loaded from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    heard: list[str] = []
    tab.on("console", lambda message: heard.append(message.text) if is_fault(message) else None)
    tab.on("pageerror", lambda error: heard.append(str(error)))
    tab.on(
        "request", lambda request: heard.append(request.url) if is_foreign(request.url) else None
    )
    yield tab
    context.close()
    assert heard == []


def is_fault(message) -> bool:
    """Whether it is an error; refused keys and lost connections are logged by every browser."""
    expected = ("401 (Unauthorized)", "net::ERR_FAILED")
    return message.type in ("error", "warning") and not message.text.endswith(expected)


def is_foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "data:"))


def complete(url: str, prompt: str, key: str = "", **body) -> None:
    """Ask the real API for two tokens."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "tiny-shakespeare", "prompt": prompt, "max_tokens": 2, "temperature": 0} | body
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def tab_to(view: Page, selector: str) -> None:
    """Press Tab until something has the focus."""
    for _ in range(60):
        if view.evaluate("s => document.activeElement === document.querySelector(s)", selector):
            return
        view.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached with Tab")


def test_tiers_are_shown_with_what_they_hold(view, tmp_path) -> None:
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


def test_a_pool_alone_shows_no_tiers(open_url, view) -> None:
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    expect(view.locator("#tiers-card")).to_be_hidden()


# --- live -----------------------------------------------------------------------------------


def test_figures_follow_the_traffic_without_a_reload(open_url, view) -> None:
    """Two equal prompts of 41 letters: 40 are found by the second, one is computed (law 4)."""
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    expect(view.locator("#saved")).to_have_text("0")
    for _ in range(2):
        complete(open_url, "What light through yonder window breaks?!", cache_salt="live")
    expect(view.locator("#saved")).to_have_text("40", timeout=10_000)
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


def test_a_pause_stops_the_figures_and_the_same_button_lets_them_go_on(open_url, view) -> None:
    view.goto(open_url)
    expect(view.locator("#requests")).to_have_text("0")
    view.click("#pause")
    complete(open_url, "abc")
    view.wait_for_timeout(1300)
    expect(view.locator("#requests")).to_have_text("0")
    expect(view.locator("#status")).to_have_text("paused")
    view.click("#pause")
    expect(view.locator("#requests")).to_have_text("1")


def test_a_server_that_ends_is_said_to_be_gone(llm, view) -> None:
    with serving(ServerState(llm)) as url:
        view.goto(url)
        expect(view.locator("#status")).to_have_text("live")
        view.route("**/ui/state", lambda route: route.abort())
        expect(view.locator("#status")).to_have_text("not connected", timeout=10_000)
        view.unroute("**/ui/state")
        expect(view.locator("#status")).to_have_text("live", timeout=10_000)
        view.goto("about:blank")


def test_what_clients_write_stays_text(open_url, view) -> None:
    """A prompt made of markup is shown letter by letter, and nothing of it runs."""
    for _ in range(2):
        complete(open_url, "<img src=x onerror=alert(1)> twice.")
    view.goto(open_url)  # the model has no letter "<": its unknown token looks like markup itself
    expect(view.locator("#prefixes tbody")).to_contain_text("<unk>img src<unk>x onerror")
    assert view.locator("main img").count() == 0


# --- chat, explanations, large pools -------------------------------------------------------------


def test_a_chat_streams_and_each_turn_leads_to_its_explanation(open_url, view) -> None:
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
        expect(view.locator(".assistant .note a")).to_have_count(number, timeout=60_000)
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


def test_a_cell_of_a_large_pool_says_how_its_blocks_are_divided(state) -> None:
    """131,072 blocks in 1,024 cells of 128; the first cell is half evictable."""
    owners = array("i", [0] * 64 + [-1] * (2**17 - 64))
    drawn = BlockMap(bytearray([BlockState.EVICTABLE] * 64) + bytes(2**17 - 64), owners, [b""])

    found = lay_out_blocks(state, drawn, Caller("root", "", may_administer=True))

    assert (found["per_cell"], len(found["states"])) == (128, 1024)
    assert found["mixes"][0] == [64, 0, 0, 64] and found["mixes"][1] == [128, 0, 0, 0]
    assert found["owners"][:2] == [0, -1] and found["states"][:2] == "30"
    assert found["counts"] == {"unused": 2**17 - 64, "private": 0, "held": 0, "evictable": 64}


# --- the playground and the accountant ------------------------------------------------------------


def test_the_playground_shows_each_token_as_cached_copied_or_computed(open_url, view) -> None:
    """By keyboard alone: blocks of eight, 19 letters in common, so 16 are cached and 3 copied."""
    view.goto(open_url)
    tab_to(view, "#prompt")
    for text in ("Playground: abcdefgh-1234", "Playground: abcdefg!?"):
        view.keyboard.press("Control+A")
        view.keyboard.type(text)
        view.keyboard.press("Control+Enter")
        expect(view.locator("#play-summary")).to_contain_text(f"{len(text)} tokens")
    expect(view.locator("#play-summary")).to_contain_text("16 cached, 3 copied, 2 computed")
    pieces = {
        origin: "".join(view.locator(f"#tokens .{origin}").all_text_contents())
        for origin in ("cached", "copied", "computed")
    }
    assert pieces == {"cached": "Playground: abcd", "copied": "efg", "computed": "!?"}
    assert view.locator("#tokens .first-of-block").count() == 2
    assert view.locator("#tokens .answer").text_content()


def test_a_prompt_that_is_not_to_be_kept_is_computed_again(open_url, view) -> None:
    view.goto(open_url)
    view.fill("#prompt", "Nothing of this stays behind.")
    view.uncheck("#write")
    for _ in range(2):
        view.click("#run")
        expect(view.locator("#run")).to_be_enabled()
        expect(view.locator("#play-summary")).to_contain_text("0 cached, 0 copied, 29 computed")


def test_the_playground_says_what_is_wrong_with_a_prompt(open_url, view) -> None:
    """The browser logs every 400; here it is the subject."""
    answer = httpx.post(f"{open_url}/ui/play", json={"prompt": "", "max_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    answer = httpx.post(f"{open_url}/ui/play", json={"prompt": "a" * 2100})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_accountant_counts_like_the_lab_and_follows_the_arrow_keys(open_url, view) -> None:
    view.goto(open_url)
    tab_to(view, "#shared")
    for selector, presses in (("#shared", 3), ("#suffix", 2), ("#requests-slider", 5)):
        tab_to(view, selector)
        for _ in range(presses):
            view.keyboard.press("ArrowRight")
    tab_to(view, "#block-size")
    view.keyboard.press("ArrowLeft")
    shared, suffix, requests, block_size = (
        int(view.locator(f'output[for="{name}"]').text_content().replace(",", ""))
        for name in ("shared", "suffix", "requests-slider", "block-size")
    )
    assert (shared, block_size) == (2000, 8)
    reuse = by_token(Workload(shared, suffix, requests, block_size))
    expect(view.locator("#savings-share")).to_have_text(f"{reuse.saved_share:.1%}")
    expect(view.locator("#savings-text")).to_contain_text(f"finds {reuse.found_tokens:,}")
    expect(view.locator("#savings-text")).to_contain_text(
        f"computes {reuse.computed_per_request_tokens:,}"
    )


def test_empty_prompts_are_refused_by_the_accountant(http) -> None:
    query = {"shared": 0, "suffix": 0, "requests": 5}
    answer = http.get("/ui/savings", params=query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


# --- for all callers ------------------------------------------------------------------------------


def test_blocks_are_walked_with_the_arrow_keys(open_url, view) -> None:
    complete(open_url, "Blocks of the map, in order.", cache_salt="walker")
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    tab_to(view, "#map")
    view.keyboard.press("Home")
    expect(view.locator("#cell")).to_contain_text("Block 0: evictable")
    view.keyboard.press("ArrowRight")
    expect(view.locator("#cell")).to_contain_text("Block 1: ")
    view.keyboard.press("End")
    expect(view.locator("#cell")).to_contain_text("Block 159: unused")
    expect(view.locator("#blocks-text")).to_contain_text("unused")
    tab_to_by_tenant = view.locator("#by-tenant")
    tab_to_by_tenant.press("Enter")
    expect(tab_to_by_tenant).to_have_attribute("aria-pressed", "true")
    expect(view.locator("#blocks-legend")).to_contain_text(salt_label("walker"))


def test_every_control_and_picture_has_a_name(open_url, view) -> None:
    """As assistive technology would read it; and headings skip no level."""
    complete(open_url, "Names for everything.")
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    tree = view.locator("body").aria_snapshot()
    for role in ("button", "combobox", "slider", "spinbutton", "checkbox", "textbox", "img"):
        lines = re.findall(rf"^\s*- {role}\b.*$", tree, re.MULTILINE)
        assert lines, f"no {role}\n{tree}"
        assert all('"' in line for line in lines), (role, lines)
    levels = [int(level) for level in re.findall(r"\[level=(\d)\]", tree)]
    assert levels.count(1) == 1 and set(levels) == {1, 2}
    assert view.locator("html").get_attribute("lang") == "en"


def test_the_dark_is_dark_and_the_switch_is_remembered(open_url, browser, view) -> None:
    def lightness() -> float:
        colour = view.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    view.goto(open_url)
    assert lightness() > 0.9
    view.emulate_media(color_scheme="dark")
    assert lightness() < 0.2
    tab_to(view, "#theme")
    view.keyboard.type("light")
    assert lightness() > 0.9
    view.reload()
    expect(view.locator("#theme")).to_have_value("light")
    assert lightness() > 0.9


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(open_url, view, theme) -> None:
    """WCAG asks for 4.5 to 1."""
    view.emulate_media(color_scheme=theme)
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    for selector in (
        "#hit-ratio",
        "#hit-detail",
        "#prefixes-title",
        "#speedup",
        "footer p",
        "#run",
    ):
        assert contrast(view, selector) >= 4.5, selector


def contrast(view: Page, selector: str) -> float:
    """Measure a text's contrast with the first background behind it that is not transparent."""
    colours = view.evaluate(
        """selector => {
            let at = document.querySelector(selector);
            const ink = getComputedStyle(at).color;
            const behind = () => getComputedStyle(at).backgroundColor;
            while (behind() === "rgba(0, 0, 0, 0)") at = at.parentElement;
            return [ink, behind()];
        }""",
        selector,
    )
    lights = sorted(map(luminance, colours))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_fits_a_narrow_screen(open_url, view) -> None:
    """With lines in all of its tables."""
    complete(open_url, "A narrow prompt with a long tail of words", cache_salt="narrow tenant")
    view.set_viewport_size({"width": 390, "height": 800})
    view.goto(open_url)
    expect(view.locator("#tenants tbody tr")).to_have_count(1)
    assert view.evaluate("document.documentElement.scrollWidth") <= 390


# --- keys ----------------------------------------------------------------------------------------


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_its_tab(locked_url, view) -> None:
    view.goto(locked_url)
    expect(view.locator("#key-panel")).to_be_visible()
    expect(view.locator("#key")).to_be_focused()
    view.keyboard.type("wrong")
    view.keyboard.press("Enter")
    expect(view.locator("#key-error")).to_have_text("The server does not know this key.")
    view.keyboard.type("key-of-ann")
    view.keyboard.press("Enter")
    expect(view.locator("#model")).to_contain_text("tenant ann")
    expect(view.locator("#key-panel")).to_be_hidden()
    view.reload()
    expect(view.locator("#model")).to_contain_text("tenant ann")
    assert view.evaluate("localStorage.length") == 0
    assert "key-of-ann" not in view.url


def test_a_tenant_sees_its_own_and_the_administrator_sees_all(locked_url, view) -> None:
    for key, text in (("key-of-ann", "Ann's own secret plan!"), ("key-of-bob", "Bob's bakery....")):
        for _ in range(2):
            complete(locked_url, text, key)
    bob = state_of(locked_url, "key-of-bob")
    root = state_of(locked_url, "key-of-root")

    assert "secret" not in str(bob) and "ann" not in str(bob)
    assert bob["totals"]["requests"] == 2
    assert bob["totals"]["prompt"] == 32
    assert bob["load"] is None and bob["tenants"] == []
    assert len(bob["blocks"]["states"]) == bob["blocks"]["count"] == 3 < 160
    assert bob["blocks"]["owners"] == [0, 0, 0] and bob["blocks"]["tenants"] == ["bob"]
    assert {prefix["tenant"] for prefix in bob["prefixes"]} == {"bob"}

    assert [row["name"] for row in root["tenants"]] == ["ann", "bob"]
    assert len(root["blocks"]["states"]) == 160
    assert "salt of" not in str(root), "salts are secrets"
    assert any(prefix["head"].startswith("Ann's own") for prefix in root["prefixes"])

    view.goto(locked_url)
    view.fill("#key", "key-of-bob")
    view.keyboard.press("Enter")
    expect(view.locator("#prefixes tbody tr").first).to_contain_text("Bob's ba")
    expect(view.locator("#tenants-card")).to_be_hidden()


def state_of(url: str, key: str) -> dict:
    answer = httpx.get(f"{url}/ui/state", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/ui/state", "/ui/savings?shared=1&suffix=1&requests=1"])
def test_without_a_key_nothing_but_the_empty_page_is_to_be_had(locked_url, path) -> None:
    assert httpx.get(f"{locked_url}/").status_code == 200
    assert httpx.get(f"{locked_url}{path}").status_code == 401
    assert httpx.post(f"{locked_url}/ui/play", json={"prompt": "abc"}).status_code == 401


# --- files ---------------------------------------------------------------------------------------


def test_the_page_forbids_what_it_does_not_need(http) -> None:
    """No inline script, no style attribute, nothing from elsewhere; and the files keep to it."""
    answer = http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    named = set(re.findall(r'(?:src|href)="(/ui/[^"]+)"', answer.text))
    assert named >= {"/ui/main.js", "/ui/style.css", "/ui/icon.svg"}
    for name in named:
        file = http.get(name)
        assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
        assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg|^\s*//.*$| // .*$", "", file.text,
                                  flags=re.MULTILINE).replace("https://", "//"), name  # fmt: skip
    assert " style=" not in answer.text and "onclick" not in answer.text


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpage.py", "%2e%2e/app.py", "__init__.py"])
def test_only_files_of_the_page_are_served(http, name) -> None:
    assert http.get(f"/ui/{name}").status_code == 404

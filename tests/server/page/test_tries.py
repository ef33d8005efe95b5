"""What can be tried on the page: prompts token by token, and what a cache would save."""

import httpx
from playwright.sync_api import expect

from ostinato.lab.simulate.savings import Workload, by_token
from tests.server.page.calls import tab_to


def test_the_playground_shows_each_token_as_cached_copied_or_computed(open_url, view):
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


def test_a_prompt_that_is_not_to_be_kept_is_computed_again(open_url, view):
    view.goto(open_url)
    view.fill("#prompt", "Zero of all this stays behind")
    view.uncheck("#write")
    for _ in range(2):
        view.click("#run")
        expect(view.locator("#run")).to_be_enabled()
        expect(view.locator("#play-summary")).to_contain_text("0 cached, 0 copied, 29 computed")


def test_the_playground_says_what_is_wrong_with_a_prompt(open_url, view):
    """The browser logs every 400; here it is the subject."""
    answer = httpx.post(f"{open_url}/ui/play", json={"prompt": "", "max_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    answer = httpx.post(f"{open_url}/ui/play", json={"prompt": "a" * 2100})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_accountant_counts_like_the_lab_and_follows_the_arrow_keys(open_url, view):
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
    expect(view.locator("#savings-text")).to_contain_text(f"finds {reuse.matched_tokens:,}")
    expect(view.locator("#savings-text")).to_contain_text(
        f"computes {reuse.computed_per_request_tokens:,}"
    )


def test_empty_prompts_are_refused_by_the_accountant(http):
    query = {"shared": 0, "suffix": 0, "requests": 5}
    answer = http.get("/ui/savings", params=query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")

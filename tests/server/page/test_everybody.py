"""The page is for everybody: by keyboard, by name, in the dark, on a narrow screen."""

import re

import pytest
from playwright.sync_api import Page, expect

from ostinato.server.telemetry.observer import salt_label
from tests.server.page.calls import complete, tab_to


def test_blocks_are_walked_with_the_arrow_keys(open_url, view):
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


def test_every_control_and_picture_has_a_name(open_url, view):
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


def test_the_dark_is_dark_and_the_switch_is_remembered(open_url, browser, view):
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
def test_text_stands_out_from_what_is_behind_it(open_url, view, theme):
    """WCAG asks for 4.5 to 1."""
    view.emulate_media(color_scheme=theme)
    view.goto(open_url)
    expect(view.locator("#status")).to_have_text("live")
    selectors = ("#hit-ratio", "#hit-detail", "#prefixes-title", "#speedup", "footer p", "#run")
    for selector in selectors:
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


def test_the_page_fits_a_narrow_screen(open_url, view):
    """With lines in all of its tables."""
    complete(open_url, "A narrow prompt with a long tail of words", cache_salt="narrow tenant")
    view.set_viewport_size({"width": 390, "height": 800})
    view.goto(open_url)
    expect(view.locator("#tenants tbody tr")).to_have_count(1)
    assert view.evaluate("document.documentElement.scrollWidth") <= 390

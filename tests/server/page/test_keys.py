"""What the page needs a key for, and which files it is made of."""

import re

import httpx
import pytest
from playwright.sync_api import expect

from tests.server.page.calls import complete


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_its_tab(locked_url, view):
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


def test_a_tenant_sees_its_own_and_the_administrator_sees_all(locked_url, view):
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
def test_without_a_key_nothing_but_the_empty_page_is_to_be_had(locked_url, path):
    assert httpx.get(f"{locked_url}/").status_code == 200
    assert httpx.get(f"{locked_url}{path}").status_code == 401
    assert httpx.post(f"{locked_url}/ui/play", json={"prompt": "abc"}).status_code == 401


def test_the_page_forbids_what_it_does_not_need(http):
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
def test_only_files_of_the_page_are_served(http, name):
    assert http.get(f"/ui/{name}").status_code == 404

"""What tests of the page do beside looking at it."""

import httpx
from playwright.sync_api import Page


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

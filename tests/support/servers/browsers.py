"""A real browser for tests: Chromium, driven by Playwright, without a network.

Playwright's loop runs in the thread that started it, so a module that uses a browser calls no
``asyncio.run`` of its own.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; where there is none the test is skipped, and says how to get it."""
    path = os.environ.get("OSTINATO_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: run scripts/install-browser, or set OSTINATO_CHROMIUM")
    expect.set_options(timeout=30_000)  # a busy machine is no bug
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()

"""The page in a real browser, against the real server."""

from collections.abc import Iterator, Mapping

import pytest
from playwright.sync_api import Browser, Page

from ostinato import AsyncLLM
from ostinato.server.access.callers import Caller
from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState
from tests.support.servers.browsers import chromium
from tests.support.servers.servers import await_idle, serving


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


@pytest.fixture(scope="package")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=160, block_size=8)
    yield engine
    await_idle(engine)
    engine.shutdown()


@pytest.fixture(scope="package")
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

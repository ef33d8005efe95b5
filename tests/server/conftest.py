"""What the server's tests share: one server of the embedded model, idle after every test."""

from collections.abc import Iterator

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers import await_idle, serving


@pytest.fixture(scope="session")
def shared_state() -> Iterator[ServerState]:
    """Load the embedded model behind a server's state."""
    llm = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=512)
    yield ServerState(llm, ServerConfig(model_names=("tiny-shakespeare", "bard")))
    llm.shutdown()


@pytest.fixture(scope="session")
def shared_url(shared_state: ServerState) -> Iterator[str]:
    """Serve it."""
    with serving(shared_state) as url:
        yield url


@pytest.fixture
def state(shared_state: ServerState) -> Iterator[ServerState]:
    """Lend the server's state; whatever a test did, nothing is left running (law 9)."""
    yield shared_state
    await_idle(shared_state.llm)
    assert shared_state.num_live == 0, "the server thinks that requests are under way"


@pytest.fixture
def url(shared_url: str, state: ServerState) -> str:
    """Return the server's address."""
    return shared_url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """Lend a client of the server that knows nothing of OpenAI."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client

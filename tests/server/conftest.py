"""What the server's tests share: one server of the embedded model, idle after every test."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from ostinato import AsyncLLM, SamplingParams
from ostinato.engine.requests.prompts import PromptDict, PromptInput
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.model_pool import pooled_models, use_pool
from tests.support.servers.servers import await_idle_server, serving

__all__ = ["pooled_models", "use_pool"]


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
    await_idle_server(shared_state)


@pytest.fixture
def url(shared_url: str, state: ServerState) -> str:
    """Return the server's address."""
    return shared_url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """Lend a client of the server that knows nothing of OpenAI."""
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """Lend OpenAI's own client, which repeats nothing."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def continuation(
    state: ServerState, prompt: PromptInput, max_tokens: int, params: SamplingParams | None = None
) -> str:
    """Return what the engine itself makes of a prompt, greedily, with a salt of its own."""
    settled = params or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    apart: PromptDict = {key: prompt, "cache_salt": "reference"}  # type: ignore[misc]

    async def generate() -> str:
        async for output in state.llm.generate(apart, settled):
            text = output.outputs[0].text
        return text

    return asyncio.run(generate())

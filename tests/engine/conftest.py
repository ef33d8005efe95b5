"""What the engine's tests share: tiny engines that must be idle after every test."""

from collections.abc import Iterator

import pytest

from ostinato import LLM
from tests.engine.api.async_calls import expected
from tests.engine.kv_events.kv_events_publishing import listen, publish
from tests.engine.tiers.tiered import new_llm, tier
from tests.support.engines import assert_idle, make_llm
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.models.model_families import VOCAB_SIZE
from tests.support.models.model_pool import pooled_models, use_pool

__all__ = [
    "bard", "checkpoints", "expected", "listen", "llm", "make_llm", "new_llm", "pooled_models",
    "publish", "tier", "use_pool",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared_llm(checkpoints: Checkpoints) -> LLM:
    """Load a random Llama in float64: 64 blocks of 4, and 256 tokens at most."""
    path, most = str(checkpoints.path("llama")), VOCAB_SIZE
    return LLM(path, dtype="float64", block_size=4, num_blocks=64, max_logprobs=most)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Lend a random Llama with a cold cache; the test leaves nothing running (law 9)."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    assert_idle(shared_llm.engine)


@pytest.fixture(scope="module")
def shared_bard() -> LLM:
    """Load the embedded model."""
    return LLM("tiny-shakespeare", dtype="float32", num_blocks=256)


@pytest.fixture
def bard(shared_bard: LLM) -> Iterator[LLM]:
    """Lend the embedded model, whose text is text, with a cold cache; as ``llm``."""
    shared_bard.reset_prefix_cache()
    yield shared_bard
    assert_idle(shared_bard.engine)

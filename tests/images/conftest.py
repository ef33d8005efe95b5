"""What these tests share: tiny models for images and text, each made and loaded once."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from ostinato import LLM
from ostinato.runner.model_loader import load_model
from tests.support.engines import assert_idle
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.models.images import ImageReference, image_checkpoint

__all__ = ["checkpoints", "make_image_llm", "reference_of"]

MakeImageLLM = Callable[..., LLM]

_load_once = cache(load_model)


@pytest.fixture
def make_image_llm(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeImageLLM]:
    """Make engines of a family in float64; after the test nothing may be left in them (law 9)."""
    made: list[LLM] = []
    monkeypatch.setattr("ostinato.engine.settings.setup.load_model", _load_once)

    def make(family: str = "llava", **settings: Any) -> LLM:
        settings = {"dtype": "float64", "block_size": 4, "num_blocks": 128, **settings}
        made.append(LLM(str(image_checkpoint(checkpoints, family)), **settings))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm.engine)
        images, encoder = llm.engine.runner.images, llm.engine.image_encoder
        if images is not None and encoder is not None:
            assert not images.num_pinned_bytes and not encoder.held


@pytest.fixture(scope="session")
def reference_of(checkpoints: Checkpoints) -> Callable[[str], ImageReference]:
    """Ask ``transformers`` instead; each family is loaded once."""
    return cache(lambda family: ImageReference(image_checkpoint(checkpoints, family)))

"""Engines for tests: of tiny checkpoints, and idle when the test is over.

::

    def test_something(make_llm):
        llm = make_llm("llama", index="hash", num_blocks=15)

Imported by the ``conftest.py`` of each room that runs engines.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import signature
from typing import Any

import pytest

from ostinato import LLM
from ostinato.engine.loop.engine import Engine
from ostinato.observe.introspection import cached_blocks
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from tests.support.models.checkpoints import Checkpoints

MakeLLM = Callable[..., LLM]

_load_facts = cache(load_model)


def load_once(*arguments: Any) -> LoadedModel:
    """Load a model once, however many tokens of keys and values are to fit beside it."""
    given = signature(load_model).bind(*arguments).arguments
    return _load_facts(**{name: value for name, value in given.items() if name != "kv_bytes"})


@pytest.fixture
def make_llm(checkpoints: Checkpoints) -> Iterator[MakeLLM]:
    """Make engines of a family in float64; after the test nothing may be left in them (law 9).

    ``config`` changes the checkpoint's config, and ``own_weights`` is for engines whose weights
    will change: others share theirs. Everything else is a setting of ``LLM``.
    """
    made: list[LLM] = []
    shared: dict[LLM, bool] = {}

    def make(
        family: str,
        *,
        config: Mapping[str, Any] | None = None,
        own_weights: bool = False,
        **settings: Any,
    ) -> LLM:
        path = checkpoints.path(family, **(config or {}))
        settings = {"dtype": "float64", "block_size": 4, "max_logprobs": -1, **settings}
        shares = settings["dtype"] == "float64" and not own_weights
        with pytest.MonkeyPatch.context() as patch:
            if shares:
                patch.setattr("ostinato.engine.settings.setup.load_model", load_once)
            made.append(LLM(str(path), **settings))
        shared[made[-1]] = shares
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm.engine)
        assert not (shared[llm] and llm.engine.cache.manager.epoch), "it changed shared weights"


def assert_idle(engine: Engine) -> None:
    """Assert law 9: no request is live, no block is held and no reference is left.

    Raises:
        AssertionError: Saying what is left.
    """
    scheduler, cache = engine.scheduler, engine.cache.manager
    assert not engine.has_work, "requests are live"
    assert not engine.request_ids, f"the engine remembers {engine.request_ids}"
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0), "sequences are left"
    assert cache.num_live_tables == 0, "tables are left"
    assert cache.pool.num_free == cache.config.num_blocks, "blocks are held"
    assert not any(cached.ref_count for cached in cached_blocks(cache.index)), "references are left"
    engine.cache.manager.check()

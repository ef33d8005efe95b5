"""Engines for tests: of tiny checkpoints, and idle when the test is over.

::

    def test_something(make_llm):
        llm = make_llm("llama", index="hash", num_blocks=15)

Imported by the ``conftest.py`` of each room that runs engines.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ostinato import LLM
from ostinato.engine.engine import Engine
from ostinato.observe.introspection import cached_blocks
from tests.support.checkpoints import Checkpoints

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(checkpoints: Checkpoints) -> Iterator[MakeLLM]:
    """Make engines of a family in float64; after the test nothing may be left in them (law 9).

    ``config`` changes the checkpoint's config; everything else is a setting of ``LLM``.
    """
    made: list[LLM] = []

    def make(family: str, *, config: Mapping[str, Any] | None = None, **settings: Any) -> LLM:
        path = checkpoints.path(family, **(config or {}))
        made.append(
            LLM(str(path), **{"dtype": "float64", "block_size": 4, "max_logprobs": -1, **settings})
        )
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm.engine)


def assert_idle(engine: Engine) -> None:
    """Assert law 9: no request is live, no block is held and no reference is left.

    Raises:
        AssertionError: Saying what is left.
    """
    scheduler, cache = engine.scheduler, engine.cache.manager
    assert not engine.has_work, "requests are live"
    assert not engine._states, f"the engine remembers {list(engine._states)}"
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0), "sequences are left"
    assert cache.num_live_tables == 0, "tables are left"
    assert cache.pool.num_free == cache.config.num_blocks, "blocks are held"
    assert not any(cached.ref_count for cached in cached_blocks(cache.index)), "references are left"
    engine.cache.manager.check()

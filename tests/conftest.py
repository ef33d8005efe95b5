"""What every test shares: threads that leave the cores to others, and how much Hypothesis draws."""

import atexit
import functools
import gc
import os
import ssl
from typing import get_args
from unittest import mock

import pytest
from hypothesis import is_hypothesis_test, settings

from ostinato.settings import IndexName
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.cache.tiny_scheduler import TinyScheduler, tiny_scheduler
from tests.support.daily_cases import leave_cases_to_the_night

# Before torch is imported by any test. By default OpenMP's threads spin while they wait, which on a
# busy machine keeps the very thread off its core that they wait for: ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before Triton is imported, which torch may do: kernels for GPUs are tested in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Collecting imports torch and all clients: millions of objects that stay, and that every search for
# garbage would visit again.
gc.disable()

# httpx loads a megabyte of certificates for each client, and no test speaks TLS.
mock.patch.object(
    ssl, "create_default_context", functools.cache(ssl.create_default_context)
).start()

# No deadline, since a busy machine is no bug.
settings.register_profile("daily", max_examples=10, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis draw few examples by day and many by night (``-m nightly``)."""
    settings.load_profile("nightly" if config.option.markexpr == "nightly" else "daily")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases of large tables to the night, which draws again what Hypothesis draws by day."""
    leave_cases_to_the_night(items)
    if config.option.markexpr == "nightly":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.nightly)
                item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run tests that are coroutines on asyncio alone."""
    return "asyncio"


@pytest.fixture(params=get_args(IndexName))
def index(request: pytest.FixtureRequest) -> IndexName:
    """Run a test that asks for an index once with each."""
    return request.param


@pytest.fixture
def cache(index: IndexName) -> TinyCache:
    """Return an empty cache of eight blocks of four tokens, with each index."""
    return tiny_cache(8, index=index)


@pytest.fixture
def tiny(index: IndexName) -> TinyScheduler:
    """Return an idle scheduler of a tiny cache, with each index."""
    return tiny_scheduler(index=index)


def pytest_collection_finish() -> None:
    """Search for garbage from now on, in what the tests make."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton counts what is frozen as leaked

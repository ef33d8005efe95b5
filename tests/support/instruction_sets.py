"""Run a test on every instruction set that this machine runs, best or not.

::

    def test_something(isa: Isa): ...           # once per set, with the fixture below
    with isa_in_use(Isa.AVX2), threads_in_use(2): ...

The set in use is one of the whole process, so it is put back after each test.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ostinato.runner.native import library as library_file
from ostinato.runner.native.library import Isa, best_isa, current_isa, library, use_isa

needs_library = pytest.mark.skipif(library() is None, reason="the native library is not built")

ISAS = [] if (found := library()) is None else best_isa(found).contained
"""What this processor can do, each containing those before it."""


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """Run the test on each instruction set in turn; skipped where there is no library."""
    with isa_in_use(request.param):
        yield request.param


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower(), scope="module")
def module_isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    """As ``isa``, for a module of tests that draw examples."""
    with isa_in_use(request.param):
        yield request.param


@contextmanager
def isa_in_use(isa: Isa) -> Iterator[None]:
    """Use an instruction set for a while."""
    native = library()
    assert native is not None
    before = current_isa(native)
    use_isa(native, isa)
    try:
        yield
    finally:
        use_isa(native, before)


@contextmanager
def threads_in_use(num_threads: int) -> Iterator[None]:
    """Let torch, and the library with it, use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package had been installed without a compiler."""
    monkeypatch.setattr(library_file, "PATH", tmp_path / "libostinato_native.so")
    library.cache_clear()
    yield
    library.cache_clear()

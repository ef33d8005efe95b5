"""Steps for the native library: its block sizes, trees of shared runs, chunks beside decodes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from ostinato.runner.attention.native_plan import NativeLimits
from ostinato.runner.native.library import Isa, best_isa, current_isa, library, use_isa
from tests.runner.attention.scene import Shape

needs_library = pytest.mark.skipif(library() is None, reason="the native library is not built")

ISAS = [] if (found := library()) is None else [isa for isa in Isa if isa <= best_isa(found)]
"""What this processor can do, one containing the other."""


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


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """A few sequences: fresh ones, decodes, chunks; some begin as an earlier one does."""
    size = draw(st.sampled_from([16, 16, 16, 32, 48, 256]))
    cached = st.sampled_from([0, size - 1, size, size + 1]) | st.integers(0, 6 * min(size, 32))
    new = st.sampled_from([1, 1, 1, 2]) | st.integers(1, 70)
    sequences = draw(st.lists(st.tuples(cached, new), min_size=1, max_size=7))
    return Shape(
        sequences=tuple(sequences),
        likes=tuple(
            draw(st.tuples(st.integers(0, i), st.integers(0, 6))) for i in range(len(sequences))
        ),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        key_dim=draw(st.sampled_from([2, 16, 64, 80, 128])),
        value_dim=draw(st.sampled_from([1, 2, 6, 16, 64, 128])),
        block_size=size,
    )


limits = st.builds(
    NativeLimits,
    item_rows=st.sampled_from([1, 4, 16, 256]),
    min_part=st.sampled_from([1.0, 64.0, 512.0]),
)
"""From one row per item, cut into parts of a block, to what is used by default."""

"""Steps for the native library: its block sizes, trees of shared runs, chunks beside decodes."""

from hypothesis import strategies as st

from ostinato.runner.attention.native_plan import NativeLimits
from tests.runner.attention.scene import Shape


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
    run_keys=st.just(32),
    section_keys=st.sampled_from([32, 64, 1024]),
    min_part=st.sampled_from([1.0, 64.0, 512.0]),
)
"""From one row per item, cut into parts of 32 keys, to what is used by default."""

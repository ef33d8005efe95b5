"""The two reference implementations agree: the obvious one and the fast one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runner.attention.reference import attend_one, attend_sequence
from tests.runner.attention.scene import styles


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(0, 12), st.integers(1, 2), st.integers(1, 2))
def test_products_say_what_one_query_head_and_key_at_a_time_say(
    data: st.DataObject, num_new: int, num_cached: int, num_kv_heads: int, group: int
):
    style = data.draw(styles(num_kv_heads * group))
    draw = torch.Generator().manual_seed(num_cached)
    queries, keys, values = (
        torch.randn(tokens, heads, 3, generator=draw, dtype=torch.float64)
        for tokens, heads in (
            (num_new, num_kv_heads * group),
            (num_cached + num_new, num_kv_heads),
            (num_cached + num_new, num_kv_heads),
        )
    )

    found = attend_sequence(queries, keys, values, style)

    for row in range(num_new):
        end = num_cached + row + 1
        expected = attend_one(queries[row], keys[:end], values[:end], style)
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)

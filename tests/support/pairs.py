"""Two independent parameters: by day each of their values is tried, and at night each pair.

::

    @pairwise("family", FAMILIES, "index", INDEXES)
    def test_something(family: str, index: str): ...
"""

from collections.abc import Iterable

import pytest


def pairwise(
    first: str, firsts: Iterable[object], second: str, seconds: Iterable[object]
) -> pytest.MarkDecorator:
    """Run with each of ``firsts`` and, in turn, one of ``seconds``; at night with all pairs."""
    seconds = list(seconds)
    pairs = []
    for row, one in enumerate(firsts):
        for column, other in enumerate(seconds):
            is_daily = row % len(seconds) == column
            marks = () if is_daily else (pytest.mark.nightly,)
            pairs.append(pytest.param(one, other, marks=marks))
    return pytest.mark.parametrize((first, second), pairs)

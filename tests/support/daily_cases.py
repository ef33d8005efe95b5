"""Large tables of cases: by day each test of a module takes other cases of its table, at night all.

::

    pytestmark = pytest.mark.one_case_in(3)

Two tests with the same nineteen families take six or seven of them by day, never the same ones.
"""

from collections import defaultdict

import pytest


def leave_cases_to_the_night(items: list[pytest.Item]) -> None:
    """Mark as nightly all but each n-th case of the functions that say ``one_case_in(n)``."""
    cases_of_modules: dict[str, dict[str, list[pytest.Item]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for item in items:
        if item.get_closest_marker("one_case_in") is not None:
            module, _, name = item.nodeid.partition("[")[0].rpartition("::")
            cases_of_modules[module][name].append(item)
    for functions in cases_of_modules.values():
        for row, cases in enumerate(functions.values()):
            for column, item in enumerate(cases):
                if not _runs_by_day(item, row, column, len(cases)):
                    item.add_marker(pytest.mark.nightly)


def _runs_by_day(item: pytest.Item, row: int, column: int, num_cases: int) -> bool:
    marker = item.get_closest_marker("one_case_in")
    assert marker is not None
    (step,) = marker.args
    return num_cases < step or (row + column) % step == 0

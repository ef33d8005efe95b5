"""No operation of the cache costs more because others have more state."""

import pytest

from benchmarks.slopes import SCENES


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_an_operation_takes_as_many_steps_beside_a_thousand_as_beside_ten(scene):
    """Steps of the interpreter are counted, and no time is measured."""
    assert scene(1_000) <= 1.5 * scene(10)

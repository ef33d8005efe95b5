"""The table of model types says what checkpoints of them do."""

import pytest

from tests.support.instruction_sets import needs_library
from tests.support.models.family_table import FAMILIES, row_of, row_on_page

pytestmark = needs_library

BY_DAY = ("gemma3_text", "gpt2")


@pytest.mark.parametrize("family", BY_DAY)
def test_a_model_type_does_what_its_row_says(family: str):
    assert row_on_page(family) == row_of(family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BY_DAY])
def test_every_model_type_does_what_its_row_says(family: str):
    assert row_on_page(family) == row_of(family)

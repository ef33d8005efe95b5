"""What these tests share: checkpoints, engines that end idle, and references."""

from collections.abc import Callable, Iterator

import pytest

from tests.exactness.reference import Reference
from tests.support.engines import make_llm
from tests.support.instruction_sets import isa
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.models.model_pool import pooled_models, use_pool

__all__ = ["checkpoints", "isa", "make_llm", "pooled_models", "reference_of", "use_pool"]

ReferenceOf = Callable[[str], Reference]


@pytest.fixture(scope="session")
def reference_of(checkpoints: Checkpoints) -> Iterator[ReferenceOf]:
    """Ask ``transformers`` instead; each family is loaded once."""
    references: dict[str, Reference] = {}

    def reference(family: str) -> Reference:
        if family not in references:
            references[family] = Reference(checkpoints.path(family))
        return references[family]

    yield reference
    references.clear()

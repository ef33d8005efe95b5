"""What the runner's tests share: checkpoints, and models loaded once."""

from collections.abc import Callable, Iterator

import pytest

from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.settings import DtypeName
from tests.support.instruction_sets import isa, module_isa
from tests.support.models.checkpoints import Checkpoints, checkpoints

__all__ = ["checkpoints", "isa", "module_isa", "served"]

Served = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def served(checkpoints: Checkpoints) -> Iterator[Served]:
    """Load a family's checkpoint, each once in a session."""
    loaded: dict[tuple[str, str], LoadedModel] = {}

    def load(family: str, dtype: DtypeName = "float64") -> LoadedModel:
        if (family, dtype) not in loaded:
            loaded[family, dtype] = load_model(checkpoints.path(family), dtype)
        return loaded[family, dtype]

    yield load
    loaded.clear()

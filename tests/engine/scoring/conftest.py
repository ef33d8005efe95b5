"""Checkpoints with other heads than a vocabulary, and what transformers computes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from tests.support.engines import make_llm
from tests.support.models.checkpoints import checkpoints, make_config, make_tokenizer

__all__ = ["checkpoints", "make_llm"]

MakeHeaded = Callable[..., Path]


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> MakeHeaded:
    """Make a checkpoint of a family without a language head: classes, or no head at all."""
    root, made = tmp_path_factory.mktemp("headed"), {}

    def make(family: str, num_labels: int = 0, **changes: Any) -> Path:
        key = (family, num_labels, str(sorted(changes.items())))
        if key not in made:
            made[key] = root / str(len(made))
            _save(made[key], family, num_labels, changes)
        return made[key]

    return make


def _save(path: Path, family: str, num_labels: int, changes: dict[str, Any]) -> None:
    auto = AutoModelForSequenceClassification if num_labels else AutoModel
    labels = {"num_labels": num_labels} if num_labels else {}
    torch.manual_seed(1)
    model = auto.from_config(make_config(family, **labels, **changes)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.3 * noise)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def reference(auto: Any, path: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Load a model of transformers with its own attention."""
    model: PreTrainedModel = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()

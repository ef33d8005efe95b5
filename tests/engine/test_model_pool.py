"""Engines of tests borrow models, and no engine sees what another one left in its model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ostinato import LLM
from tests.support.models.checkpoints import Checkpoints, edit_config
from tests.support.models.model_pool import POOL


def borrow(path: Path, **settings: object) -> LLM:
    return LLM(str(path), dtype="float32", num_blocks=8, **settings)


def end(llm: LLM, lent_before: set[int | None]) -> torch.nn.Module:
    """End an engine as its test would; returns its model."""
    POOL.end_test(lent_before)
    return llm.engine.loaded.model


def test_a_model_is_lent_again_when_its_test_has_ended_and_to_one_engine_at_a_time(
    checkpoints: Checkpoints,
):
    path, before = checkpoints.path("llama"), set(POOL.lent)
    first, second = borrow(path), borrow(path)
    models = {first.engine.loaded.model, second.engine.loaded.model}
    assert len(models) == 2
    assert first.engine.loaded.tokenizer is not second.engine.loaded.tokenizer
    POOL.end_test(before)
    assert {borrow(path).engine.loaded.model, borrow(path).engine.loaded.model} == models
    assert borrow(path, forward="plain").engine.loaded.model not in models


def write_in_place(llm: LLM) -> None:
    with torch.no_grad():
        next(llm.engine.loaded.model.parameters()).mul_(2)


def update(llm: LLM) -> None:
    name = "model.layers.0.mlp.up_proj.weight"  # packed: no tensor of the model is written
    llm.update_weights({name: -llm.engine.loaded.model.state_dict()[name]})


def leave_a_hook(llm: LLM) -> None:
    llm.engine.loaded.model.get_input_embeddings().register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [write_in_place, update, leave_a_hook])
def test_a_model_that_was_changed_is_never_lent_again(
    checkpoints: Checkpoints, change: Callable[[LLM], None]
):
    before, llm = set(POOL.lent), borrow(checkpoints.path("llama"))
    change(llm)
    model = end(llm, before)
    assert borrow(checkpoints.path("llama")).engine.loaded.model is not model


def test_a_checkpoint_whose_files_were_changed_is_loaded(checkpoints: Checkpoints, tmp_path: Path):
    path = Path(shutil.copytree(checkpoints.path("llama"), tmp_path / "own"))
    before, llm = set(POOL.lent), borrow(path)
    model = end(llm, before)
    edit_config(path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert borrow(path).engine.loaded.model is not model

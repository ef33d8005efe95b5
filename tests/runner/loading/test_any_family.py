"""A checkpoint of any family ends in a model or in a refusal by name, in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from ostinato.errors import OstinatoError, UnsupportedModel
from ostinato.runner.loading.model_support import auto_class
from ostinato.runner.model_loader import load_model
from tests.support.models.checkpoints import Checkpoints, make_config, save_checkpoint

MAX_WEIGHTS = 20_000_000
SMALL: dict[str, Any] = {"num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2}


def test_text_only_llama_4_is_loaded_or_refused_for_its_chunks(checkpoints: Checkpoints):
    loaded = load_model(
        checkpoints.path("llama4_text", layer_types=["full_attention"] * 2, head_dim=16), "bfloat16"
    )
    assert len(loaded.kv_spec.layers) == 2

    with pytest.raises(UnsupportedModel, match="layers of type chunked_attention"):
        load_model(checkpoints.path("llama4_text"), "bfloat16")


def test_what_fails_in_another_library_is_a_refusal(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a model's code")

    monkeypatch.setattr("ostinato.runner.model_loader.stream_model", fail)

    with pytest.raises(UnsupportedModel, match="ZeroDivisionError: in a model's code"):
        load_model(checkpoints.path("llama"))


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(CONFIG_MAPPING))
def test_every_family_of_transformers_ends_in_a_model_or_a_refusal(family: str, tmp_path: Path):
    """Those of which a tiny checkpoint can be made."""
    try:
        config = make_config(family, **SMALL)
        with torch.device("meta"):
            weights = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
        if weights > MAX_WEIGHTS:
            pytest.skip(f"{weights:,} weights")
        save_checkpoint(tmp_path / "tiny", config)
    except Exception as error:  # whatever a config or a model's code raises
        pytest.skip(f"no tiny checkpoint of it: {type(error).__name__}: {error}"[:200])
    try:
        loaded = load_model(tmp_path / "tiny", "bfloat16")
    except OstinatoError as error:
        assert str(error)
    else:
        assert loaded.forward.name in ("fused", "packed", "plain")

"""A model that does not fit is refused before its weights are read; one that is read is shown."""

from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.core.errors import ConfigError
from ostinato.runner import model_loader
from ostinato.runner.checkpoints import load_progress
from ostinato.runner.checkpoints.load_progress import LoadProgress
from ostinato.runner.loading import load_memory
from ostinato.runner.model_loader import load_model
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import save_gguf

BIG: dict[str, Any] = {"vocab_size": 30_000, "hidden_size": 1024, "intermediate_size": 4096}
STEP = 2**28


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(load_memory, "available_bytes", lambda: num_bytes)


def test_the_refusal_names_the_numbers_and_what_would_fit(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Weights of 0.16 GiB in bfloat16, half of that in 8 bits."""
    path = checkpoints.path("llama", dtype="bfloat16", **BIG)
    monkeypatch.setattr(model_loader, "read_whole", None)
    with_free(monkeypatch, STEP + 270_000_000)

    with pytest.raises(ConfigError) as refusal:
        load_model(path)

    said = str(refusal.value)
    assert "needs 0.53 GiB: 0.16 GiB of weights" in said and "0.50 GiB are free" in said
    assert "quantization='int8'" in said and "quantization='int4'" in said
    load_model(path, quantization="int8")


def test_blocks_that_do_not_fit_are_refused_with_their_setting(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with_free(monkeypatch, STEP + 2**20)

    for settings in ({"num_blocks": 10_000}, {"kv_cache_memory": 2**22}):
        with pytest.raises(ConfigError, match=r"fewer blocks \(num_blocks or kv_cache_memory\)"):
            LLM(checkpoints.path("llama"), **settings)
    LLM(checkpoints.path("llama"), num_blocks=16)


def test_keys_and_values_are_priced_in_the_dtype_that_they_are_kept_in(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Of float32, blocks take twice what they take in bfloat16: 32 MiB, where 24 are free."""
    path = checkpoints.path("llama")
    per_token = load_model(path, "float32").kv_spec.bytes_per_token(torch.float32)
    num_blocks = 32 * 2**20 // (16 * per_token)
    with_free(monkeypatch, STEP + 24 * 2**20)

    with pytest.raises(ConfigError, match=r"0\.03 GiB of keys and values"):
        LLM(path, dtype="float32", num_blocks=num_blocks)
    for dtype, kv_dtype in (("bfloat16", "auto"), ("float32", "bfloat16")):
        LLM(path, dtype=dtype, kv_cache_dtype=kv_dtype, num_blocks=num_blocks)


def test_a_model_that_is_read_as_a_whole_has_to_fit_as_well(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with_free(monkeypatch, STEP)

    with pytest.raises(ConfigError, match=r"read as a whole, which needs .* are free"):
        load_model(checkpoints.path("gpt2"))


def test_progress_has_a_rate_and_the_time_left():
    progress = LoadProgress("big", 4 * 2**30)
    progress.add(2**30)

    assert progress.line(2.0) == "loading big: 1.00 of 4.00 GiB, 512 MiB/s, 6 s left"
    progress.add(4 * 2**30)
    assert progress.line(2.0).endswith(" 0 s left"), "whatever is read twice"


def test_without_a_terminal_there_are_lines(
    checkpoints: Checkpoints,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """For every byte of the file, once."""
    monkeypatch.setattr(load_progress, "SHOWN_BYTES", 0)
    monkeypatch.setattr(load_progress, "SECONDS_PER_LINE", 0.0)
    path = checkpoints.path("qwen3", hidden_size=64, head_dim=128, tie_word_embeddings=True)

    sources = path, save_gguf(tmp_path / "tied.gguf", path)
    capfd.readouterr()
    for source in sources:
        load_model(source)
        lines = [
            line for line in capfd.readouterr().err.splitlines() if line.startswith("loading ")
        ]
        assert len(lines) > 10 and lines[-1].endswith(" 0 s left")

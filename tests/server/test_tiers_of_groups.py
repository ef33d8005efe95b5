"""Models with windows and with states behind a server that restarts: usage, answers, disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.tier_restart import ask, chat, folder_bytes, walk
from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import open_state
from tests.support.chat_templates import CHATML
from tests.support.checkpoints import make_config, make_tokenizer, save_checkpoint
from tests.support.servers import serving

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 64},
    "qwen3_next": {},
    "mistral": {"sliding_window": 64},
    "lfm2": {},
}
LIMITS_KIB = {"gemma3_text": 512, "qwen3_next": 2048, "mistral": 512, "lfm2": 1024}

NewModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> NewModel:
    """Makes tiny checkpoints with a chat template, for prompts of up to 4,096 tokens."""

    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp("models") / family
        changes = {"max_position_embeddings": 4096, "dtype": "bfloat16", **CONFIGS[family]}
        save_checkpoint(path, make_config(family, **changes))
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_a_chat_hits_after_a_restart_of_its_server(
    family: str, chat_model: NewModel, tmp_path: Path
):
    """Up to its last whole block or state, with the same answer; then its bytes are erased."""
    model, disk, answers = chat_model(family), tmp_path / "kv", list[Any]()
    for _ in range(2):
        settings = {"num_blocks": 100, "kv_disk": disk, "kv_disk_bytes": 4 << 20}
        state = open_state(str(model), settings, ServerConfig(model_names=(str(model),)))
        with serving(state) as url, httpx.Client(base_url=url, timeout=60) as http:
            answers.append(ask(http, model, chat(800)))
            if len(answers) == 2:
                receipt = http.post("/admin/erase", json={"cache_salt": "verona"}).json()
        state.llm.shutdown()
    (computed, answer), (restored, again) = answers
    unit = 64 if family == "qwen3_next" else 16
    num_cached = (restored["prompt_tokens"] - 1) // unit * unit
    assert (computed["cached_tokens"], computed["disk_tokens"]) == (0, 0)
    assert (restored["cached_tokens"], restored["disk_tokens"]) == (num_cached, num_cached)
    assert again == answer
    assert receipt["tiers"][0]["complete"] and receipt["tiers"][0]["num_extents"] > 1
    assert folder_bytes(disk)["not_zero"] < 1024


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONFIGS)
def test_a_served_process_keeps_its_limit_and_hits_after_sigterm(
    family: str, chat_model: NewModel, tmp_path: Path
):
    """A disk that others have filled: its limit holds for the whole folder, seen from outside."""
    model, limit = chat_model(family), f"{LIMITS_KIB[family]}KiB"
    options = ["--num-blocks", "600", "--max-model-len", "4096"]
    result = walk(model, tmp_path / "kv", 4000, *options, limit=limit, num_others=12)
    print(result)
    restored = result["restored"]
    assert restored["prompt_tokens"] > 2000 and result["same_answer"]
    assert restored["prompt_tokens"] - restored["cached_tokens"] <= 64
    assert restored["cached_tokens"] == restored["disk_tokens"]
    assert result["max_allocated"] <= LIMITS_KIB[family] << 10
    assert result["erased"]["complete"] and result["erased"]["num_extents"] > 1

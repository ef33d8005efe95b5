"""Models with windows and with states behind a server that restarts: usage, answers, disk."""

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import open_state
from tests.support.models.chat_templates import CHATML
from tests.support.models.checkpoints import make_config, make_tokenizer, save_checkpoint
from tests.support.servers.served_process import served
from tests.support.servers.servers import serving

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 64},
    "qwen3_next": {},
    "mistral": {"sliding_window": 64},
    "lfm2": {},
}
LIMITS_KIB = {"gemma3_text": 512, "qwen3_next": 2048, "mistral": 512, "lfm2": 1024}

WORDS = ("the", "light", "through", "yonder", "window", "breaks", "it", "is", "east", "Juliet")

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


def chat(num_letters: int, number: int = 0) -> dict[str, Any]:
    """Return a call with a prompt of so many letters, each a token; others have their own salt."""
    text = " ".join(random.Random(number).choices(WORDS, k=num_letters))[:num_letters]
    salt = f"other {number}" if number else "verona"
    settings = {"max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    return {"messages": [{"role": "user", "content": text}], "cache_salt": salt, **settings}


def ask(http: httpx.Client, model: Path, call: dict[str, Any]) -> tuple[dict[str, int], Any]:
    """Send a chat; returns counts of its tokens, and the answer with log-probabilities."""
    response = http.post("/v1/chat/completions", json={"model": str(model), **call})
    answer = response.raise_for_status().json()
    usage = answer["usage"]
    counts = {"disk_tokens": 0, **usage["prompt_tokens_details"]}
    return {"prompt_tokens": usage["prompt_tokens"], **counts}, answer["choices"][0]


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that the file system allocated for a folder."""
    num_bytes = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # evicted meanwhile
            num_bytes += path.stat().st_blocks * 512
    return num_bytes


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
    left = [np.count_nonzero(np.fromfile(path, np.uint8)) for path in disk.iterdir()]
    assert sum(left) < 1024


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONFIGS)
def test_a_served_process_keeps_its_limit_and_hits_after_sigterm(
    family: str, chat_model: NewModel, tmp_path: Path
):
    """A disk that others have filled: its limit holds for the whole folder, seen from outside."""
    model, disk, limit = chat_model(family), tmp_path / "kv", LIMITS_KIB[family]
    options = ["--num-blocks", "600", "--max-model-len", "4096", "--kv-disk", str(disk)]
    options += ["--kv-disk-bytes", f"{limit}KiB"]
    answers, sizes = list[Any](), list[int]()
    for num_others in (12, 0):
        with served(str(model), *options) as server:
            with httpx.Client(base_url=server.url, timeout=300) as http:
                for number in range(1, num_others + 1):
                    ask(http, model, chat(4000, number))
                    sizes.append(allocated_bytes(disk))
                answers.append(ask(http, model, chat(4000)))
                if not num_others:
                    receipt = http.post("/admin/erase", json={"cache_salt": "verona"}).json()
                    sizes.append(allocated_bytes(disk))
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        sizes.append(allocated_bytes(disk))
    (_, answer), (restored, again) = answers
    assert restored["prompt_tokens"] > 2000 and again == answer
    assert restored["prompt_tokens"] - restored["cached_tokens"] <= 64
    assert restored["cached_tokens"] == restored["disk_tokens"]
    assert max(sizes) <= limit << 10
    [erased] = receipt["tiers"]
    assert erased["complete"] and erased["num_extents"] > 1

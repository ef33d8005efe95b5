"""A chat over HTTP before and after a restart of `ostinato serve`, and the bytes on its disk.

::

    python -m benchmarks.tier_restart

For each of two small shapes, a Gemma 3 and a Qwen3-Next, a server with a disk tier answers a chat
and ends with SIGTERM; the next one, on the same folder, answers it again and erases its tenant. The
folder is measured from outside: what the file system allocated, and bytes that are not zero.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command_line import parser_of
from ostinato.runner.checkpoints.model_resolver import resolve_model

TENANT = "verona"
LIMIT = "256MiB"
SECONDS = 300

_COMMON: dict[str, Any] = {
    "vocab_size": 68, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **_COMMON,
        "sliding_window": 512,
        "query_pre_attn_scalar": 64,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    },
    "qwen3_next": {
        **_COMMON,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
}  # fmt: skip

_WORDS = ("the", "light", "through", "yonder", "window", "breaks", "it", "is", "east", "Juliet")
_SIZES = "disk", "after_erase", "after_close"
_ADDRESS = re.compile(r"(http://\S+)/v1")


def make_chat_checkpoint(family: str, folder: Path) -> Path:
    """Save a model with random weights, and the tokenizer and template of the embedded model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("tiny-shakespeare") / name, folder)
    return folder


def chat(num_letters: int, number: int = 0) -> dict[str, Any]:
    """Return a call with a prompt of so many letters, each a token of the embedded model's."""
    words = random.Random(number).choices(_WORDS, k=num_letters)
    text = " ".join(words)[:num_letters]
    salt = TENANT if number == 0 else f"other {number}"
    settings = {"max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    return {"messages": [{"role": "user", "content": text}], "cache_salt": salt, **settings}


@contextmanager
def served(model: Path, disk: Path, limit: str, *options: str) -> Iterator[httpx.Client]:
    """Run a server on a free port; SIGTERM ends it.

    Raises:
        RuntimeError: It did not start, or its exit code was not 0.
    """
    command = [sys.executable, "-m", "ostinato.cli", "serve", str(model), "--port", "0"]
    command += ["--kv-disk", str(disk), "--kv-disk-bytes", limit, *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=os.environ | {"COLUMNS": "200"})
        try:
            with httpx.Client(base_url=_address(process, log), timeout=SECONDS) as http:
                yield http
            process.send_signal(signal.SIGTERM)
            if process.wait(SECONDS):
                log.seek(0)
                raise RuntimeError(f"the server failed: {log.read()}")
        finally:
            process.kill()
            process.wait()


def _address(process: "subprocess.Popen[bytes]", log: Any) -> str:
    """Wait until a server has logged its address."""
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        text = os.pread(log.fileno(), 1 << 20, 0).decode()
        if address := _ADDRESS.search(text):
            return address[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {text}")


def folder_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes that the file system allocated for a folder, and those that are not 0."""
    sizes = {"allocated": 0, "not_zero": 0}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # evicted meanwhile
            allocated = path.stat().st_blocks * 512
            sizes["not_zero"] += int(np.count_nonzero(np.fromfile(path, np.uint8)))
            sizes["allocated"] += allocated
    return sizes


def ask(http: httpx.Client, model: Path, call: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Send a chat; returns its figures, and the answer with log-probabilities.

    Raises:
        RuntimeError: The server refused it.
    """
    begun_s = time.perf_counter()
    response = http.post("/v1/chat/completions", json={"model": str(model), **call})
    if response.is_error:
        raise RuntimeError(response.text)
    answer = response.json()
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    figures = {
        "seconds": round(time.perf_counter() - begun_s, 2),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": details["cached_tokens"],
        "disk_tokens": details.get("disk_tokens", 0),
    }
    return figures, answer["choices"][0]


def walk(
    model: Path,
    disk: Path,
    num_letters: int,
    *options: str,
    limit: str = LIMIT,
    num_others: int = 0,
) -> dict[str, Any]:
    """Chat, restart, chat again, and erase; returns what each part showed.

    Args:
        model: Folder of a checkpoint.
        disk: Folder of the tier.
        num_letters: Of the chat's prompt.
        options: Of ``ostinato serve``, besides.
        limit: Of the disk.
        num_others: Chats of other tenants before, to fill the disk.
    """
    result, sizes = dict[str, Any](), list[int]()
    with served(model, disk, limit, *options) as http:
        for number in range(1, num_others + 1):
            ask(http, model, chat(num_letters, number))
            sizes.append(folder_bytes(disk)["allocated"])
        result["computed"], computed = ask(http, model, chat(num_letters))
    result["disk"] = folder_bytes(disk)
    with served(model, disk, limit, *options) as http:
        result["restored"], restored = ask(http, model, chat(num_letters))
        receipt = http.post("/admin/erase", json={"cache_salt": TENANT})
        result["erased"] = receipt.raise_for_status().json()["tiers"][0]
        result["after_erase"] = folder_bytes(disk)
    result["after_close"] = folder_bytes(disk)
    result["same_answer"] = computed == restored
    result["max_allocated"] = max([*sizes, *(result[x]["allocated"] for x in _SIZES)])
    return result


def main() -> None:
    """Print a line of JSON for each shape."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    for family in SHAPES:
        with tempfile.TemporaryDirectory() as name:
            model = make_chat_checkpoint(family, Path(name) / "model")
            result = walk(model, Path(name) / "kv", options.tokens)
            print(json.dumps({"family": family, **result}), flush=True)


if __name__ == "__main__":
    main()

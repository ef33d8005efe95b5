"""First tokens after a restart of models with windows and with states, and what a disk keeps.

::

    python -m benchmarks.tier_groups

For each of two small shapes, a Gemma 3 and a Qwen3-Next, one process computes a prompt and closes;
an engine on the same folder then loads it. The answers are compared.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ostinato import LLM, SamplingParams

_COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
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


def make_checkpoint(family: str, folder: Path) -> Path:
    """Save a model with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def measure(family: str, num_tokens: int, folder: Path) -> dict[str, Any]:
    """Compute a prompt in one engine and load it in the next."""
    model = make_checkpoint(family, folder / "model")
    prompt = [3 + i * i % 4001 for i in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    result, answers = dict[str, Any](family=family, prompt_tokens=num_tokens), []
    for name in ("computed", "restored"):
        settings: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 600, "max_model_len": 8192}
        with LLM(model, kv_disk=folder / "kv", kv_disk_bytes=2**30, **settings) as llm:
            llm.generate({"prompt_token_ids": [5] * 300}, params, use_tqdm=False)
            output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            answers.append(output.outputs[0].token_ids)
            result[f"{name}_ms"] = round(1000 * output.timings.time_to_first_token, 1)
            result["from"] = output.cached_tokens_from
            groups = llm.engine.tiers.groups.groups
            result["bytes_per_token"] = {
                group.name: group.copies.block_bytes // (group.unit if group.name != "state" else 1)
                for group in groups
            }
    result["same_answer"] = answers[0] == answers[1]
    return result


def main() -> None:
    """Print a line of JSON for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    options = parser.parse_args()
    for family in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(family, options.tokens, Path(folder))), flush=True)


if __name__ == "__main__":
    main()

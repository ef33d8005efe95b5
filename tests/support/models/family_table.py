"""The table of model types in ``docs/models.md``, from tiny checkpoints with their configs.

::

    python -m tests.support.models.family_table

writes it between ``<!-- families -->`` and ``<!-- end families -->``; a nightly test compares.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.errors import OstinatoError
from ostinato.runner.images.vision_families import FAMILIES as SEEING
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from tests.support.models.adapters import save_adapter
from tests.support.models.checkpoints import make_config, save_checkpoint

PAGE = Path(__file__).parents[3] / "docs/models.md"
HEADER = "| Model type | Forward | 4 bits | LoRA | Images | Disk tier | Audit | Same bits |"

_WINDOWS: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "granite", "seed_oss", "gemma2",
    "gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4",
    "stablelm", "nemotron", "exaone4", "hunyuan_v1_dense", "starcoder2", "ernie4_5", "gpt_neox",
    "gpt2", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "minimax_m2", "granitemoe",
    "granitemoeshared", "qwen2_moe", "glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3",
    "phimoe", "cohere2_moe", "laguna", "afmoe", "deepseek_v3", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "lfm2_moe", "jamba",
    "bamba",
)  # fmt: skip
"""Model types that people run, in the order of the table."""

CHANGES: dict[str, dict[str, Any]] = {
    "ministral3": {"head_dim": 12},
    "smollm3": {"num_hidden_layers": 4},
    "granite": {"residual_multiplier": 0.3, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "seed_oss": {"head_dim": 12},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "olmo3": _WINDOWS,
    "cohere2": _WINDOWS,
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "exaone4": _WINDOWS,
    "hunyuan_v1_dense": {"head_dim": 12},
    "mixtral": _EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _EXPERTS,
}
"""What their config says besides that of ``model_families``."""


def row_of(family: str) -> str:
    """Return the row of a model type."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        save_checkpoint(path, make_config(family, **CHANGES.get(family, {})))
        loaded = load_model(path, "bfloat16")
        cells = (
            f"`{family}`",
            _forward(loaded),
            _can(lambda: load_model(path, "bfloat16", quantization="int4")),
            _can(lambda: _adapted(family, path, Path(folder) / "adapter")),
            "yes" if family.removesuffix("_text") in SEEING else "–",
            _can(lambda: _engine(path, kv_disk=f"{folder}/tier", kv_disk_bytes=1 << 26)),
            _can(lambda: _engine(path, audit_share=1.0)),
            "yes" if loaded.fused is not None and loaded.fused.promises_bits else "not promised",
        )
    return f"| {' | '.join(cells)} |"


def table(families: Iterator[str] | None = None) -> str:
    """Return the table, of all families by default."""
    rule = "|" + "---|" * HEADER.count(" | ") + "---|"
    return "\n".join((HEADER, rule, *map(row_of, families or FAMILIES)))


def row_on_page(family: str) -> str | None:
    """Return the row of a model type as the page has it."""
    row = re.search(rf"^\| `{family}` \|.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return None if row is None else row[0]


def _forward(loaded: LoadedModel) -> str:
    if loaded.fused is None:
        reason = loaded.forward.reason.split("; ")[0].partition("is not fused: ")[2]
        return f"{loaded.forward.name}: {reason or loaded.forward.reason}"
    names = re.findall(r"(\S+) is called", loaded.fused.called)
    calls = ", ".join(dict.fromkeys(f"`{name}`" for name in names))
    return f"fused, but for {calls}" if calls else "fused"


def _can(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OstinatoError:
        return "no"
    return "yes"


def _engine(path: Path, **settings: Any) -> None:
    LLM(str(path), dtype="bfloat16", num_blocks=32, block_size=16, **settings).close()


def _adapted(family: str, path: Path, folder: Path) -> None:
    targets = {"gpt_neox": ["query_key_value", "dense"], "gpt2": ["c_attn", "c_fc"]}
    changes = {"target_modules": targets[family]} if family in targets else {}
    save_adapter(path, folder, 1, **changes)
    llm = LLM(str(path), dtype="bfloat16", num_blocks=32, block_size=16, enable_lora=True)
    try:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        request = LoRARequest("adapter", 1, str(folder))
        llm.generate([[5, 6, 7]], params, use_tqdm=False, lora_request=request)
    finally:
        llm.close()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    between = re.compile(r"(<!-- families -->\n).*?(<!-- end families -->\n)", re.DOTALL)
    found = table()
    PAGE.write_text(between.sub(lambda m: f"{m[1]}\n{found}\n\n{m[2]}", text), encoding="utf-8")

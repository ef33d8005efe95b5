"""What ``transformers`` says of a checkpoint, with its own attention and experts in plain torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def reference_model(path: Path, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Load a checkpoint in float64, in which the library's kernels for experts do not compute."""
    model: PreTrainedModel = auto.from_pretrained(
        path,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


def generate(
    model: Any, prompt: Sequence[int], num_new: int, ends: Sequence[int] = (), **options: Any
) -> Any:
    """Let a model continue a prompt, greedily by default, up to one of the ids that end it."""
    model.generation_config.eos_token_id = list(ends) or None
    model.generation_config.pad_token_id = 0
    rows = torch.tensor([prompt])
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows), **options}
    with torch.inference_mode():
        return model.generate(**inputs, max_new_tokens=num_new, do_sample=False)

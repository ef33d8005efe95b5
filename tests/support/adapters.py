"""LoRA adapters with random weights, saved by ``peft``, and what ``peft`` itself says with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATION = [7, 8, 9]
"""Token ids that activate the tests' activated adapters."""


def save_adapter(base: Path, folder: Path, seed: int, **config: Any) -> Path:
    """Save an adapter of a checkpoint with random weights; returns its directory."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, **config}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).double() * 0.3
    adapted.save_pretrained(folder)
    return folder


class PeftReference:
    """A checkpoint with adapters of ``peft``, in float64 with eager attention."""

    def __init__(self, base: Path, folders: Sequence[Path]) -> None:
        """Load both."""
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float64, attn_implementation="eager"
        )
        model.generation_config.eos_token_id = None
        self._model = PeftModel.from_pretrained(model, folders[0], folders[0].name).double()
        for folder in folders[1:]:
            self._model.load_adapter(folder, folder.name)
        self._model.double().eval()

    def generated(self, prompt: Sequence[int], adapter: str, num_new: int) -> list[int]:
        """Continue a prompt greedily with an adapter, or none."""
        ids = {
            "input_ids": torch.tensor([prompt]),
            "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64),
        }
        options: dict[str, Any] = {"max_new_tokens": num_new, "do_sample": False}
        if not adapter:
            with self._model.disable_adapter():
                output = self._model.generate(**ids, **options)
        else:
            self._model.set_adapter(adapter)
            output = self._model.generate(**ids, **options)
        return output[0, len(prompt) :].tolist()

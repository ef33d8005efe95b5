"""LoRA adapters with random weights, in the files of ``peft``, and what ``peft`` says with them."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ostinato.runner.experts.mixture import first_outputs, stacks_by_name
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.references import generate, reference_model

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATION = [7, 8, 9]
"""Token ids that activate the tests' activated adapters."""


def save_adapter(base: Path, folder: Path, seed: int, **config: Any) -> Path:
    """Save an adapter of a checkpoint with random weights; returns its directory."""
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_LINEAR,
        "bias": "none",
        **config,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    generator, tensors, rank = torch.Generator().manual_seed(seed), {}, settings["r"]
    of_mixtral = "w1" in settings["target_modules"]
    for name, width, height in _layers(model, of_mixtral):
        if name.endswith(tuple(f".{target}" for target in settings["target_modules"])):
            for part, size in {"A": (rank, width), "B": (height, rank)}.items():
                weights = torch.randn(size, generator=generator) * 0.3
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = weights
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _layers(model: nn.Module, of_mixtral: bool) -> Iterator[tuple[str, int, int]]:
    """Yield names, inputs and outputs of what were linear layers in transformers before 5."""
    mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if of_mixtral else {}
    for name, module in model.named_modules():
        own = name.replace(".mlp", ".block_sparse_moe") if of_mixtral else name
        for weight, parts in first_outputs(stacks := stacks_by_name(module)).items():
            stack = stacks[weight]
            for expert, part in product(range(stack.num_experts), parts):
                layer = f"{own}.{expert}.{mixtral.get(part, part)}"
                yield layer, stack.in_features, stack.part_rows
        if getattr(module, "weight", None) is not None and module.weight.ndim == 2:
            yield own, *module.weight.shape[:: 1 if isinstance(module, Conv1D) else -1]


def save_with_peft(base: Path, folder: Path, seed: int, **settings: Any) -> Path:
    """Let ``peft`` save an adapter of a checkpoint with random weights; returns its directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=3, lora_alpha=8, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(std=0.3, generator=generator)
        model.save_pretrained(str(folder))
    return folder


class PeftReference:
    """A checkpoint with adapters of ``peft``, in float64 with eager attention."""

    def __init__(self, base: Path, folders: Sequence[Path]) -> None:
        """Load both."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            model = reference_model(base)
            self._model = PeftModel.from_pretrained(model, folders[0], folders[0].name)
            for folder in folders[1:]:
                self._model.load_adapter(folder, folder.name)
        self._model.double().eval()

    def generated(
        self, prompt: Sequence[int], adapter: str, num_new: int, num_beams: int = 1
    ) -> list[int]:
        """Continue a prompt with an adapter, or none: greedily, or as the best of some beams."""
        with warnings.catch_warnings(), self._using(adapter):
            warnings.simplefilter("ignore")
            output = generate(self._model, prompt, num_new, num_beams=num_beams)
        return list(output[0, len(prompt) :].tolist())

    def last_hidden(self, prompt: Sequence[int], adapter: str) -> list[float]:
        """Return the last hidden state of a prompt with an adapter, or none."""
        with torch.inference_mode(), self._using(adapter):
            states = self._model(torch.tensor([prompt]), output_hidden_states=True)
        return list(states.hidden_states[-1][0, -1].tolist())

    @contextmanager
    def _using(self, adapter: str) -> Iterator[None]:
        """Compute with an adapter, or with none."""
        if adapter:
            self._model.set_adapter(adapter)
            yield
        else:
            with self._model.disable_adapter():
                yield

    def save(self, folder: Path) -> None:
        """Save all adapters as ``peft`` does, each in a directory of its name."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model.save_pretrained(str(folder))


@pytest.fixture(scope="session")
def adapters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save adapters of the tests' Llama: ``sql``, ``fr`` (rsLoRA) and ``judge`` (activated)."""
    base, folder = checkpoints.path("llama"), tmp_path_factory.mktemp("adapters")
    save_adapter(base, folder / "sql", 1)
    targets = ["q_proj", "down_proj"]
    save_adapter(base, folder / "fr", 2, r=3, use_rslora=True, target_modules=targets)
    save_adapter(base, folder / "judge", 3, alora_invocation_tokens=INVOCATION)
    return folder

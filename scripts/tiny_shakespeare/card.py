"""The model card: its form is `card.md`, its figures are measured afterwards."""

import os
import string
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FORM = Path(__file__).parent / "card.md"
BYTES_PER_VALUE = 2  # bfloat16
NUM_SAMPLED_TOKENS = 600


def write_card(
    folder: Path,
    run: Mapping[str, object],
    loss_at: Callable[[PreTrainedModel, int], float],
    lengths: tuple[int, int],
) -> None:
    """Load the saved model as a user would, measure it, and write `README.md` beside it.

    Args:
        folder: The saved model and tokenizer.
        run: What only the training run knows: `command`, `minutes`, `steps` and so on.
        loss_at: Validation loss of a model at a context length, nats per character.
        lengths: The short and the long context length to report.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    in_bfloat16 = [f"{loss_at(model, length):.3f}" for length in lengths]
    in_float32 = [f"{loss_at(model.float(), length):.3f}" for length in lengths]
    form = string.Template(FORM.read_text())
    card = form.substitute(
        run,
        **shape_of(model),
        loss_short=in_float32[0],
        loss_long=in_float32[1],
        loss_short_bf16=in_bfloat16[0],
        loss_long_bf16=in_bfloat16[1],
        sample=sample_text(model, tokenizer),
    )
    (folder / "README.md").write_text(card)


def shape_of(model: PreTrainedModel) -> dict[str, object]:
    """Collect what the config says about size."""
    config = model.config
    kv_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        "parameters": f"{model.num_parameters() / 1e6:.2f} million",
        "architecture": type(model).__name__,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "kv_bytes": f"{kv_values * BYTES_PER_VALUE:,}",
        "context": f"{config.max_position_embeddings:,}",
        "vocabulary": config.vocab_size,
    }


def sample_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """Write what follows the heading `ROMEO:`, always with the same random numbers."""
    torch.manual_seed(1)
    prompt = tokenizer("ROMEO:\n", return_tensors="pt")
    ids = model.eval().generate(
        **prompt,
        max_new_tokens=NUM_SAMPLED_TOKENS,
        min_new_tokens=NUM_SAMPLED_TOKENS,
        do_sample=True,
        temperature=0.8,
    )
    return str(tokenizer.decode(ids[0]))


def machine_kind(threads: int) -> str:
    """Say in a few words what the run is computed on."""
    level = torch.backends.cpu.get_cpu_capability()
    info = Path("/proc/cpuinfo")
    amx = " with AMX" if info.exists() and "amx_bf16" in info.read_text() else ""
    return (
        f"{threads} thread{'s' * (threads > 1)} of a shared {os.cpu_count()}-core {level} CPU{amx}"
    )

"""The model that all engines run: random weights, or SmolLM2 with real text.

::

    python -m benchmarks.peers.checkpoint FOLDER            # the shape of the measures, 946 MB
    python -m benchmarks.peers.checkpoint FOLDER --small    # runs in a moment
    python -m benchmarks.peers.checkpoint FOLDER --smollm2  # after: ostinato models get smollm2

A Qwen3 with 28 layers of 1,024, 16 query and 8 key/value heads of 128, 3,072 in between, a
vocabulary of 32,000 and tied embeddings, in bfloat16. What random weights say means nothing; what
they cost is what trained ones cost. The tokenizer gives each id a word of its own, for the
engines that insist on one; all prompts are token ids.

SmolLM2-135M-Instruct comes out of the GGUF file that ``ostinato models get smollm2`` fetches: its
weights of 4 bits as bfloat16 for all but llama.cpp, which runs the file itself. Prompts are pieces
of this project's documentation.
"""

import argparse
import json
from array import array
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by the names of ``Qwen3Config``."""

    num_hidden_layers: int = 28
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 32_000
    max_position_embeddings: int = 40_960


FULL = Shape()
SMALL = Shape(2, 128, 256, 4, 2, 64, 512)
SMOLLM2 = Shape(30, 576, 1536, 9, 3, 64, 49_152, 8_192)
ROPE_THETA = 1e6
GGUF_FILE = "model.gguf"
"""A file of this name in a checkpoint is what llama.cpp runs."""


def make_checkpoint(folder: Path, shape: Shape = FULL, seed: int = 0) -> Path:
    """Write a checkpoint with a tokenizer, unless it is there already; returns the folder."""
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = Qwen3Config(
        **vars(shape),
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    _write_tokenizer(folder, shape.vocab_size)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _spell_for_older_loaders(folder / "config.json", ROPE_THETA)
    return folder


def make_smollm2(folder: Path) -> Path:
    """Write SmolLM2 in bfloat16, and a link to its GGUF file; returns the folder.

    Raises:
        ModelNotFound: The file was not fetched yet.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from ostinato.runner.fetched_models import fetched_file
    from ostinato.runner.gguf_file import open_gguf

    path = fetched_file("smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    with open_gguf(path):
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(folder)
    (folder / GGUF_FILE).symlink_to(path)
    model.save_pretrained(folder)
    _spell_for_older_loaders(folder / "config.json", model.config.rope_parameters["rope_theta"])
    return folder


def read_text(folder: Path) -> "array[int]":
    """Return this project's documentation in a checkpoint's tokens."""
    from transformers import AutoTokenizer

    pages = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))
    text = "\n\n".join(page.read_text("utf-8") for page in pages)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return array("i", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, then one word for every id that is left; the first id ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"word{number}" for number in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)


def _spell_for_older_loaders(path: Path, rope_theta: float) -> None:
    """Add the keys that ``transformers`` 4 had, which some engines still read."""
    config = json.loads(path.read_text())
    config.update(torch_dtype="bfloat16", rope_theta=rope_theta)
    path.write_text(json.dumps(config, indent=1))


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--smollm2", action="store_true")
    options = parser.parse_args()
    if options.smollm2:
        print(make_smollm2(options.folder))
        return
    print(make_checkpoint(options.folder, SMALL if options.small else FULL))


if __name__ == "__main__":
    main()

"""On which model is everybody measured? One of random weights, the same for all.

::

    python -m benchmarks.peers.checkpoint FOLDER            # the shape of the measures, 946 MB
    python -m benchmarks.peers.checkpoint FOLDER --small    # runs in a moment

A Qwen3 with 28 layers of 1,024, 16 query and 8 key/value heads of 128, 3,072 in between, a
vocabulary of 32,000 and tied embeddings, in bfloat16. What random weights say means nothing; what
they cost is what trained ones cost. The tokenizer gives each id a word of its own, for the
engines that insist on one; all prompts are token ids.
"""

import argparse
import json
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
ROPE_THETA = 1e6


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
    _spell_for_older_loaders(folder / "config.json")
    return folder


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


def _spell_for_older_loaders(path: Path) -> None:
    """Add the keys that ``transformers`` 4 had, which some engines still read."""
    config = json.loads(path.read_text())
    config.update(torch_dtype="bfloat16", rope_theta=ROPE_THETA)
    path.write_text(json.dumps(config, indent=1))


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    print(make_checkpoint(options.folder, SMALL if options.small else FULL))


if __name__ == "__main__":
    main()

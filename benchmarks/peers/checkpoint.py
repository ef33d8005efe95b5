"""The model that all engines run: random weights of a known shape, or SmolLM2 with real text.

::

    python -m benchmarks.peers.checkpoint FOLDER            # the shape of the measures, 880 MB
    python -m benchmarks.peers.checkpoint FOLDER --shape qwen3-4b                # 8 GB
    python -m benchmarks.peers.checkpoint FOLDER --shape qwen3-4b --gguf Q4_0    # 2.4 GB
    python -m benchmarks.peers.checkpoint FOLDER --smollm2  # after: ostinato models get smollm2

The shape of the measures is a Qwen3 with 28 layers of 1,024, 16 query and 8 key/value heads of 128,
3,072 in between, a vocabulary of 32,000 and tied embeddings, in bfloat16. What random weights say
means nothing; what they cost is what trained ones cost. The tokenizer gives each id a word of its
own, for the engines that insist on one; all prompts are token ids.

SmolLM2-135M-Instruct comes out of the GGUF file that ``ostinato models get smollm2`` fetches: its
weights of 4 bits as bfloat16 for all but llama.cpp, which runs the file itself. Prompts are pieces
of this project's documentation.
"""

import json
from array import array
from pathlib import Path
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.peers import shapes

SMOLLM2 = shapes.Shape("llama", {
    "vocab_size": 49_152, "max_position_embeddings": 8_192,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64,
})  # fmt: skip
GGUF_FILE = "model.gguf"
"""A file of this name in a checkpoint is what llama.cpp runs."""


def make_checkpoint(folder: Path, shape: shapes.Shape = shapes.FULL, seed: int = 0) -> Path:
    """Write a checkpoint with a tokenizer, unless it is there already; returns the folder."""
    weights = folder / "model.safetensors"
    if weights.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config()
    config.architectures = [_class_of(config)]
    config.save_pretrained(folder)
    _write_tokenizer(folder, shape.vocab_size)
    _spell_for_older_loaders(folder / "config.json", config)
    partial = weights.with_suffix(".partial")
    shapes.write_safetensors(partial, config, seed)
    partial.rename(weights)
    return folder


def make_gguf(folder: Path, name: str, kind: str, seed: int = 0) -> Path:
    """Write a GGUF file of a shape, unless it is there already; returns its path."""
    path = folder / f"{name}-{kind}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shape, partial = shapes.SHAPES[name], path.with_suffix(".partial")
        shapes.write_gguf(partial, shape.config(), kind, words(shape.vocab_size), seed)
        partial.rename(path)
    return path


def _class_of(config: Any) -> str:
    from transformers import AutoModelForCausalLM

    return str(AutoModelForCausalLM._model_mapping[type(config)].__name__)


def make_smollm2(folder: Path) -> Path:
    """Write SmolLM2 in bfloat16, and a link to its GGUF file; returns the folder.

    Raises:
        ModelNotFound: The file was not fetched yet.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from ostinato.runner.checkpoints.fetched_models import fetched_file
    from ostinato.runner.checkpoints.gguf_file import open_gguf

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
    _spell_for_older_loaders(folder / "config.json", model.config)
    return folder


def read_text(folder: Path) -> "array[int]":
    """Return this project's documentation in a checkpoint's tokens."""
    from transformers import AutoTokenizer

    pages = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))
    text = "\n\n".join(page.read_text("utf-8") for page in pages)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return array("i", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def words(vocab_size: int) -> list[str]:
    """Return the words of a vocabulary: what ends a text, bytes, and one for every id left."""
    from tokenizers import pre_tokenizers

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return tokens + [f"word{number}" for number in range(len(tokens), vocab_size)]


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(words(vocab_size))}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=shapes.CHAT_TEMPLATE,
    ).save_pretrained(folder)


def _spell_for_older_loaders(path: Path, config: Any) -> None:
    """Add the keys that ``transformers`` 4 had, which some engines still read."""
    rope = config.rope_parameters
    spelled = json.loads(path.read_text())
    spelled.update(
        torch_dtype="bfloat16", rope_theta=rope.get("full_attention", rope)["rope_theta"]
    )
    path.write_text(json.dumps(spelled, indent=1))


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="random")
    parser.add_argument("--gguf", choices=shapes.GGUF_TYPES, help="write a GGUF file instead")
    parser.add_argument("--smollm2", action="store_true")
    options = parser.parse_args()
    if options.smollm2:
        print(make_smollm2(options.folder))
    elif options.gguf:
        print(make_gguf(options.folder, options.shape, options.gguf))
    else:
        print(make_checkpoint(options.folder, shapes.SHAPES[options.shape]))


if __name__ == "__main__":
    main()

"""Tiny checkpoints with real configs, random weights and a tokenizer trained on the spot.

::

    def test_something(checkpoints):
        load_model(checkpoints.path("llama"), "float64")

Weights are large enough that the greedy token depends on the whole context.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ostinato.runner.loading.model_support import auto_class
from tests.support.models.model_families import (
    BASE,
    COMPOSITE_HYBRIDS,
    COMPOSITES,
    FAMILIES,
    GATED_MIXTURES,
    HYBRIDS,
    MIXTURES,
    UNSUPPORTED,
    VOCAB_SIZE,
)

_LINES = (
    "A phrase that keeps returning under ever new melodies is called an ostinato.",
    "The same prefix, another suffix; the same bass, another tune above it.",
    "You are a helpful assistant. Answer briefly, and say so if you do not know.",
    "Once upon a time there was a block of sixteen tokens that nobody computed twice.",
)


class Checkpoints:
    """Makes checkpoints on demand, each once, in one directory."""

    def __init__(self, root: Path) -> None:
        """Keep them below ``root``."""
        self._root = root

    def path(self, family: str, **changes: Any) -> Path:
        """Return a checkpoint of a family, its config changed as given."""
        suffix = "".join(f"-{name}-{abs(hash(str(changes[name])))}" for name in sorted(changes))
        path = self._root / f"{family}{suffix}"
        if not path.exists():
            with _quiet():
                save_checkpoint(path, make_config(family, **changes))
        return path

    def broken(self, name: str, family: str = "llama") -> Path:
        """Return a checkpoint with one of the faults in ``FAULTS``."""
        path = self._root / f"{family}-broken-{name}"
        if not path.exists():
            with _quiet():
                save_checkpoint(path, make_config(family))
                FAULTS[name](path)
        return path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints that last for the session."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Build the config of a family."""
    composites = {**COMPOSITES, **COMPOSITE_HYBRIDS}
    if family in composites:
        text, vision = composites[family]
        return CONFIG_MAPPING[family](
            text_config={**BASE, **text}, vision_config=vision, tie_word_embeddings=False
        )
    special = {**FAMILIES, **HYBRIDS, **MIXTURES, **GATED_MIXTURES, **UNSUPPORTED}.get(family, {})
    base = {} if family in ("gpt2", "t5") else BASE
    common = {name: BASE[name] for name in BASE if name.endswith(("_id", "vocab_size"))}
    return CONFIG_MAPPING[family](**{**base, **common, **special, **changes})


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with weights that make greedy tokens hang on the context."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto_class(config)
    torch.manual_seed(0)
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            # Vectors are norms and biases, sinks among them: leave them near where they are.
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.3 * noise)
    return model


def save_checkpoint(path: Path, config: PreTrainedConfig, max_shard_size: str = "1GB") -> None:
    """Write config, weights and tokenizer, as a hub repository has them."""
    dtype = config.dtype or torch.float32
    make_model(config).to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on a few lines."""
    tokenizer = byte_level_bpe(_LINES, VOCAB_SIZE, ["<pad>", "<eos>", "<bos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def byte_level_bpe(texts: Iterable[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as most models have one; special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _lose_shard(path: Path) -> None:
    shutil.rmtree(path)
    save_checkpoint(path, make_config("llama"), max_shard_size="50KB")
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def _lose_weights(path: Path) -> None:
    with rewritten_weights(path) as weights:
        del weights["model.layers.1.mlp.up_proj.weight"]


def _change_weights(path: Path, **changes: torch.Tensor) -> None:
    with rewritten_weights(path) as weights:
        weights |= changes


@contextmanager
def rewritten_weights(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Read the weights of a checkpoint in one file, and write them again when they are changed."""
    weights = load_file(path / "model.safetensors")
    yield weights
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "missing shard": _lose_shard,
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "missing weights": _lose_weights,
    "unexpected weights": lambda path: _change_weights(path, stranger=torch.zeros(3)),
    "mismatched weights": lambda path: _change_weights(
        path, **{"model.norm.weight": torch.zeros(7)}
    ),
    "no config": lambda path: (path / "config.json").unlink(),
    "corrupt config": lambda path: (path / "config.json").write_text('{"model_type": "lla'),
    "config without type": lambda path: (path / "config.json").write_text("{}"),
    "impossible config": lambda path: edit_config(path, hidden_size="wide"),
    "corrupt tokenizer": lambda path: (path / "tokenizer.json").write_text('{"version": '),
    "unknown type": lambda path: edit_config(path, model_type="nonesuch"),
}
"""What can be wrong with a checkpoint, and how to make it so."""


def without_tokenizer(path: Path, target: Path) -> Path:
    """Copy a checkpoint, but for its tokenizer."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of ``transformers`` among the dots of pytest."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()

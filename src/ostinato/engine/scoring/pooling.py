"""How a checkpoint turns hidden states into an embedding.

Read from the files of sentence-transformers, if there are any::

    modules.json                       Transformer, Pooling, perhaps Dense and Normalize
    1_Pooling/config.json              which hidden states are pooled: the last, or the mean of all
    config_sentence_transformers.json  prompts by name, such as "query"

Without them the last token is pooled, and normalised.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from ostinato.errors import BrokenCheckpoint


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states become an embedding.

    Attributes:
        refusal: Why there are no embeddings; empty if there are.
        is_embedder: Whether the checkpoint says that it is one.
        mode: Which hidden states: that of the last token, or the mean of all. Those of a cached
            prefix are not kept, so a mean does not read the cache.
        normalizes: Whether embeddings have length 1.
        dimensions: Lengths to which they may be cut (Matryoshka; arXiv 2205.13147); empty if the
            checkpoint names none.
        prompts: Texts that precede others, by name.
    """

    refusal: str = ""
    is_embedder: bool = False
    mode: Literal["last", "mean"] = "last"
    normalizes: bool = True
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, config: PreTrainedConfig) -> "Pooling":
        """Read it from a checkpoint's directory; a GGUF file has none of these files.

        Raises:
            BrokenCheckpoint: One of the files is damaged.
        """
        if not path.is_dir():
            return cls()
        modules = _read(path / "modules.json", list)
        kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
        folders = [module.get("path", "") for module in modules if "Pooling" in str(module)]
        pooling = _read(path / (folders[0] if folders else "1_Pooling") / "config.json", dict)
        stated = _read(path / "config_sentence_transformers.json", dict).get("prompts") or {}
        modes = _modes(pooling)
        sizes = getattr(config, "matryoshka_dimensions", None) or ()
        return cls(
            _refusal(kinds, modes, pooling.get("include_prompt") is not False),
            is_embedder=bool(pooling),
            mode="mean" if modes == ["mean"] else "last",
            normalizes="Normalize" in kinds or not modules,
            dimensions=tuple(map(int, sizes)),
            prompts={str(name): str(text) for name, text in stated.items()},
        )


def _modes(pooling: Mapping[str, Any]) -> list[str]:
    """Return the names of what is pooled; empty without a file."""
    modes = [name for name, is_on in pooling.items() if name.startswith("pooling_mode_") and is_on]
    named = pooling.get("pooling_mode")
    modes = [str(named)] if named else [name.removeprefix("pooling_mode_") for name in modes]
    return [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]


def _refusal(kinds: list[str], modes: list[str], includes_prompt: bool) -> str:
    """Return why embeddings cannot be given; empty if they can."""
    other = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if other:
        return (
            f"the checkpoint ends in {', '.join(sorted(other))} (modules.json), which is not "
            "served: use sentence-transformers"
        )
    if modes in ([], ["lasttoken"]) or (modes == ["mean"] and includes_prompt):
        return ""
    name = "+".join(modes) if includes_prompt else "mean without its prompt"
    return (
        f"pooling={name!r} (1_Pooling/config.json) is not served: take a checkpoint that pools the "
        "last token or the mean of all, or use sentence-transformers"
    )


def _read(path: Path, kind: type) -> Any:
    """Read a JSON file of a known type; empty if there is none."""
    if not path.exists():
        return kind()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} is not understood: {error}") from error
    if not isinstance(content, kind):
        raise BrokenCheckpoint(f"{path} must hold a {kind.__name__}")
    return content

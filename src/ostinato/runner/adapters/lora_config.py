"""Reads the config of a LoRA adapter of ``peft``, and refuses what cannot be served exactly.

No entry that would change the result is ignored, and no file may take long to read.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.core.errors import RequestError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_CONFIG_BYTES = 2**20

_UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA is not served: merge it into the weights (merge_and_unload)",
    "modules_to_save": "whole modules that were trained beside it are not served",
    "lora_bias": "biases of adapters are not served",
    "layer_replication": "replicated layers are not served",
    "trainable_token_indices": "retrained token embeddings are not served",
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "kasa_config": "KaSA is not served: it changes the base weights",
    "monteclora_config": "MonteCLoRA is not served",
    "arrow_config": "Arrow routers are not served",
    "megatron_config": "Megatron's parallel layers are not served",
}
"""Entries of a config that are refused if they are set."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that also change the base model's weights."""

_COSTLY = re.compile(r"\)[*+?{]|(.*[*+{]){5}", re.DOTALL)
"""Regular expressions whose search may take too long."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The config of an adapter that can be served.

    Attributes:
        rank: Default rank of a layer.
        alpha: Default alpha of a layer; the update's factor is alpha divided by the rank.
        ranks: Ranks by suffix or regular expression of a layer's name, as in ``peft``.
        alphas: Likewise.
        use_rslora: Whether alpha is divided by the square root of the rank instead.
        base: Name of the base model, for messages.
        invocation: Token ids that activate the adapter; empty if it always applies.
        parameters: Suffixes of the names of parameters that it targets, rather than of layers.
        is_turned: Whether inputs and outputs of stacked experts are the other way around, as in
            ``peft`` before 0.19.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    use_rslora: bool
    base: str
    invocation: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    is_turned: bool = False

    def targets(self, parameter: str) -> bool:
        """Whether a parameter of the model is a target by its own name, as in ``peft``."""
        return any(f".{parameter}".endswith(f".{own}") for own in self.parameters)

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer or a parameter."""
        return int(_of_pattern(self.ranks, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        """Return the factor of a layer's update."""
        rank = self.rank_of(layer)
        divisor = math.sqrt(rank) if self.use_rslora else rank
        return _of_pattern(self.alphas, layer, self.alpha) / divisor


def read_config(folder: Path, vocab_size: int) -> LoraConfig:
    """Read and check an adapter's config.

    Raises:
        RequestError: It cannot be read, or is not supported.
    """
    config = _read(folder)
    _refuse_unserved(folder, config)
    return LoraConfig(
        rank=_number(folder, "r", config.get("r"), int),
        alpha=_number(folder, "lora_alpha", config.get("lora_alpha"), int, float),
        ranks=_patterns(folder, "rank_pattern", config, int),
        alphas=_patterns(folder, "alpha_pattern", config, int, float),
        use_rslora=bool(config.get("use_rslora")),
        base=f"{config.get('base_model_name_or_path')!r:.80}",
        invocation=_invocation(folder, config.get("alora_invocation_tokens"), vocab_size),
        parameters=_parameters(folder, config.get("target_parameters") or []),
        is_turned=re.match(r"0\.1[0-8]\.", str(config.get("peft_version"))) is not None,
    )


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_CONFIG_BYTES + 1)
        if len(text) > _CONFIG_BYTES:
            raise RequestError(f"{path}: an adapter's config is never above {_CONFIG_BYTES} bytes")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"adapter {str(folder)!r}: no readable {CONFIG_FILE}: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise RequestError(f"{path}: peft_type={kind!r:.80}: only LORA is served")
    return config


def _refuse_unserved(folder: Path, config: dict[str, Any]) -> None:
    """Refuse entries that this engine does not support."""
    for name, reason in _UNSERVED.items():
        if config.get(name):
            raise RequestError(f"adapter {str(folder)!r} has {name}={config[name]!r:.80}: {reason}")
    if config.get("bias", "none") != "none":
        raise RequestError(
            f"adapter {str(folder)!r} has bias={config['bias']!r:.80}: trained biases are not "
            "served"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise RequestError(
            f"adapter {str(folder)!r} has init_lora_weights={init!r:.80}, which changes the base "
            "weights: convert it to plain LoRA (save_pretrained with path_initial_model_for_weight_"
            "conversion)"
        )


def _number(folder: Path, name: str, value: Any, *kinds: type) -> Any:
    """Return a number above 0."""
    if type(value) not in kinds or not 0 < value <= 2**31:
        what = "a number" if float in kinds else "a whole number"
        raise RequestError(f"{folder / CONFIG_FILE}: {name}={value!r:.80}: must be {what} above 0")
    return value


def _patterns(folder: Path, name: str, config: dict[str, Any], *kinds: type) -> Mapping[str, float]:
    """Return numbers by pattern; the patterns are matched with the names of all layers."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise RequestError(f"{folder / CONFIG_FILE}: {name} must map names to numbers")
    for pattern, value in patterns.items():
        _number(folder, f"{name}[{pattern!r:.80}]", value, *kinds)
        try:
            is_fine = re.compile(pattern) and not _COSTLY.search(pattern[:200])
        except (re.error, RecursionError, OverflowError):
            is_fine = False
        if not is_fine or len(pattern) > 200:
            raise RequestError(
                f"{folder / CONFIG_FILE}: {name} has the pattern {pattern!r:.80}: must be a name, "
                "or a regular expression with at most four repetitions, none of them of a group"
            )
    return patterns


def _parameters(folder: Path, names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            f"{folder / CONFIG_FILE}: target_parameters={names!r:.80}: must be a list of names"
        )
    return tuple(names)


def _of_pattern(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """Return a layer's own value; patterns are suffixes or regular expressions, as in ``peft``."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _invocation(folder: Path, ids: object, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids that activate an adapter."""
    if ids is None:
        return ()
    is_row = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not isinstance(ids, list) or not is_row or not ids:
        raise RequestError(
            f"adapter {str(folder)!r} has alora_invocation_tokens={ids!r:.80}: must be token ids "
            f"below {vocab_size}, at least one"
        )
    return tuple(ids)

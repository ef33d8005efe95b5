"""Reads values of a model's config under any of their spellings.

Model families spell the same value differently: ``n_head`` in GPT-2, ``num_attention_heads`` in
Llama, ``n_heads`` in MPT. A ``ConfigReader`` has one name for it, and its errors name the config's
own key. Three cases are kept apart:

* the key has a value: it is used;
* the key is ``null``: the value is derived, as the family's config class does;
* the key is missing: the family's default is used; without one, the config is refused.
"""

from collections.abc import Mapping

from ostinato.errors import ConfigError, UnsupportedModel

Config = Mapping[str, object]
"""A config, or a part of one, as parsed from ``config.json``."""

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
    ),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
    ),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "sliding_window": ("sliding_window", "attention_window_size", "window_size"),
    "layer_types": ("layer_types", "layers_block_type"),
    "dtype": ("dtype", "torch_dtype"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts"),
    "n_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
}
"""Spellings of each key."""

_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def language_part(config: Config) -> Config:
    """Return the part of a config that describes the language model.

    Multimodal configs nest it; a part without its own ``model_type`` or dtype inherits those of the
    whole.
    """
    for key in _LANGUAGE_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            inherited = {
                k: config[k] for k in ("model_type", "dtype", "torch_dtype") if k in config
            }
            return language_part({**inherited, **part})
    return config


class ConfigReader:
    """A config's values under canonical names.

    Attributes:
        model_type: The config's own ``model_type``, for messages.
    """

    __slots__ = ("_config", "_defaults", "model_type")

    def __init__(self, config: Config, defaults: Config, model_type: str) -> None:
        """Read a config, with a family's defaults."""
        self._config = config
        self._defaults = defaults
        self.model_type = model_type

    def overridden(self, values: Config) -> "ConfigReader":
        """Return a reader with some values replaced, for a layer with its own shape."""
        replaced = {key for name in values for key in SPELLINGS.get(name, (name,))}
        kept = {key: value for key, value in self._config.items() if key not in replaced}
        return ConfigReader({**kept, **values}, self._defaults, self.model_type)

    def value(self, name: str) -> object:
        """Return a key's value or its default; None for ``null`` and for neither.

        Raises:
            ConfigError: Two spellings of the key contradict each other.
        """
        spelled = [key for key in SPELLINGS.get(name, (name,)) if key in self._config]
        if not spelled:
            return self._defaults.get(name)
        given = {key: self._config[key] for key in spelled if self._config[key] is not None}
        values = list(given.values())
        if any(value != values[0] for value in values[1:]):
            listed = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise ConfigError(f"{listed}: these keys mean the same, so they must agree")
        return values[0] if values else None

    def optional(self, name: str) -> int | None:
        """Return a count, or None where it is ``null`` or missing.

        Raises:
            ConfigError: It is not an integer, or below 1.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.key(name)}={value!r}: must be an integer, at least 1")
        return value

    def count(self, name: str) -> int:
        """Return a required count.

        Raises:
            ConfigError: It is not an integer, or below 1.
            UnsupportedModel: It is missing, and the family has no known default.
        """
        value = self.optional(name)
        if value is None:
            spellings = SPELLINGS.get(name, (name,))
            others = f" (nor {', '.join(spellings[1:])})" if spellings[1:] else ""
            raise UnsupportedModel(
                f"the config lacks {spellings[0]}{others}, and there is no known default for "
                f"model_type={self.model_type!r}: add the key, if this is a decoder"
            )
        return value

    def flag(self, name: str) -> bool:
        """Return whether a switch is on; off where it is ``null`` or missing.

        Raises:
            ConfigError: It is not a boolean.
        """
        value = self.value(name)
        if value not in (None, True, False):
            raise ConfigError(f"{self.key(name)}={value!r}: must be true or false")
        return bool(value)

    def sequence(self, name: str) -> tuple[object, ...] | None:
        """Return a list's entries, or None where it is ``null`` or missing.

        Raises:
            ConfigError: It is not a list.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{self.key(name)}={value!r}: must be a list")
        return tuple(value)

    def part(self, name: str) -> "ConfigReader":
        """Return a nested part, such as MPT's ``attn_config``; empty where it is missing.

        Raises:
            ConfigError: It is not an object.
        """
        value = self.value(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.key(name)}={value!r}: must be an object")
        return ConfigReader(value or {}, {}, self.model_type)

    def key(self, name: str) -> str:
        """Return the spelling that this config uses."""
        spellings = SPELLINGS.get(name, (name,))
        return next((key for key in spellings if key in self._config), spellings[0])

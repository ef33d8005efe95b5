"""The type of each layer, and its number of KV heads.

Newer configs list ``layer_types``. Older ones say it in a family's own way, or not at all,
and leave it to the config class: every second layer of Gemma 2 slides a window, every fourth
of Qwen3-Next attends in full. A pattern returns the list that the config leaves out.

Most configs say ``num_key_value_heads``, where ``null`` means as many as query heads; the rules at
the end are for those that say it otherwise.
"""

from collections.abc import Callable

from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.lab.size.kv_config import ConfigReader

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
CONV = "conv"
HYBRID = "hybrid"
NONE = "no_attention"

OTHER_NAMES = {
    "attention": FULL,
    "global": FULL,
    "local": SLIDING,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "recurrent": LINEAR,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "mlp": NONE,
    "moe": NONE,
}
"""Names of layer types in older configs, and ours."""

Pattern = Callable[[ConfigReader, int], tuple[str, ...]]
"""From a config and its number of layers to one type per layer."""


def all_of(layer_type: str) -> Pattern:
    """Return a pattern of equal layers."""
    return lambda config, num_layers: (layer_type,) * num_layers


def every(interval: int, rest: str, key: str | None = None) -> Pattern:
    """Return a pattern in which the last layer of each interval attends in full.

    Args:
        interval: Length of the interval, where the config does not tell.
        rest: Type of the other layers.
        key: The config's key for the interval.
    """

    def pattern(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        length = (config.optional(key) if key else None) or interval
        return tuple(rest if (i + 1) % length else FULL for i in range(num_layers))

    return pattern


def sliding_when_set(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide everywhere if there is a window: Mistral, Mixtral, Phi-3, StarCoder 2."""
    return (FULL if config.value("sliding_window") is None else SLIDING,) * num_layers


def sliding_when_used(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide everywhere if ``use_sliding_window`` is on: Qwen3-MoE."""
    return (SLIDING if _uses_window(config) else FULL,) * num_layers


def sliding_above(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide from layer ``max_window_layers`` on, if ``use_sliding_window``: Qwen2, Qwen3."""
    if not _uses_window(config):
        return (FULL,) * num_layers
    first = config.optional("max_window_layers") or 0
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


def sliding_below_alternating(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide in every second layer below ``max_window_layers``, if switched on: Qwen2-MoE."""
    last = (config.optional("max_window_layers") or 0) if _uses_window(config) else 0
    return tuple(SLIDING if i % 2 == 0 and i < last else FULL for i in range(num_layers))


def by_position_encoding(rotary: str, nope: str) -> Pattern:
    """Return a pattern that follows ``no_rope_layers``: Llama 4 and SmolLM3.

    Despite its name the key holds 1 for layers *with* rotary positions.
    """

    def pattern(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
        marks = config.sequence("no_rope_layers")
        if not marks:
            interval = config.optional("no_rope_layer_interval") or 4
            marks = tuple(int((i + 1) % interval != 0) for i in range(num_layers))
        return tuple(rotary if mark else nope for mark in marks)

    return pattern


def smollm3(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide in the layers without rotary positions, if ``use_sliding_window`` is on."""
    nope = SLIDING if _uses_window(config) else FULL
    return by_position_encoding(FULL, nope)(config, num_layers)


def periodic(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend where ``attn_layer_period`` and ``attn_layer_offset`` say: Jamba."""
    period, offset = config.count("attn_layer_period"), config.value("attn_layer_offset")
    return tuple(FULL if i % period == offset else LINEAR for i in range(num_layers))


def by_index(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend in the layers that ``attn_layer_indices`` lists: Bamba."""
    listed = config.sequence("attn_layer_indices") or ()
    return tuple(FULL if i in listed else LINEAR for i in range(num_layers))


def lfm2(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend in the layers that ``full_attn_idxs`` lists, in all without such a list."""
    listed = config.sequence("full_attn_idxs")
    return tuple(FULL if listed is None or i in listed else CONV for i in range(num_layers))


def gemma4(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Slide in five of six layers, but never in the last."""
    return (*every(6, SLIDING)(config, num_layers)[:-1], FULL)


def kimi_linear(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend in the layers that ``full_attn_layers`` counts from 1, else in every fourth."""
    listed = config.part("linear_attn_config").sequence("full_attn_layers")
    full = {i for i in range(4, num_layers, 4)} if listed is None else listed
    shift = 0 if listed is None else 1
    return tuple(FULL if i + shift in full else LINEAR for i in range(num_layers))


def minimax(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend where ``attn_type_list`` holds 1, else in every second layer, from the first."""
    marks = config.sequence("attn_type_list") or [i % 2 == 0 for i in range(num_layers)]
    return tuple(FULL if mark else LINEAR for mark in marks)


def gpt_neo(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Read ``attention_types``, such as ``[[["global", "local"], 12]]``."""
    written = config.sequence("attention_types") or ([["global", "local"], num_layers // 2],)
    names: list[str] = []
    for item in written:
        match item:
            case [[*types], int(repeats)]:
                names += [str(name) for name in types] * repeats
            case _:
                raise ConfigError(
                    f"attention_types={list(written)!r}: must list pairs of names and a number "
                    "of repeats"
                )
    return tuple(names)


def recurrent_gemma(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Repeat ``block_types``; its attention always slides."""
    blocks = config.sequence("block_types") or ("recurrent", "recurrent", "attention")
    names = [SLIDING if block == "attention" else str(block) for block in blocks]
    return tuple(names[i % len(names)] for i in range(num_layers))


def nemotron_h(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Read ``hybrid_override_pattern``: M for Mamba, * for attention, - and E for none."""
    letters = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}
    written = config.value("hybrid_override_pattern")
    if not isinstance(written, str) or not set(written) <= set(letters):
        raise UnsupportedModel(
            f"hybrid_override_pattern={written!r}: must be made of the letters {''.join(letters)}; "
            "or list layers_block_type"
        )
    return tuple(letters[letter] for letter in written)


def written_down(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Attend in full everywhere, for unknown families.

    Raises:
        UnsupportedModel: There is a window, and no list tells which layers it holds for.
    """
    switched_off = config.value("use_sliding_window") is False
    for key in ("sliding_window", "attention_chunk_size"):
        if config.value(key) is not None and not switched_off:
            raise UnsupportedModel(
                f"{config.key(key)}={config.value(key)!r}, but no layer_types say which layers of "
                f"model_type={config.model_type!r} it holds for: add layer_types, or set it to null"
            )
    return (FULL,) * num_layers


def _uses_window(config: ConfigReader) -> bool:
    return config.flag("use_sliding_window") and config.value("sliding_window") is not None


KVHeads = Callable[[ConfigReader, int], int]
"""From a config and its number of query heads to its number of KV heads."""


def own_key(config: ConfigReader, num_heads: int) -> int:
    """Read the key; ``null`` means as many as query heads."""
    return config.optional("num_key_value_heads") or num_heads


def required_key(config: ConfigReader, num_heads: int) -> int:
    """Read the required key, for unknown families."""
    return config.count("num_key_value_heads")


def one_each(config: ConfigReader, num_heads: int) -> int:
    """Give each query head its own, as in GPT-2."""
    return num_heads


def big_code(config: ConfigReader, num_heads: int) -> int:
    """Share one among all, unless ``multi_query`` is off: StarCoder."""
    return num_heads if config.value("multi_query") is False else 1


def falcon(config: ConfigReader, num_heads: int) -> int:
    """Share one among all if ``multi_query``, unless the new architecture names a number.

    Falcon-7B's config says ``num_kv_heads: 71`` and means 1.
    """
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    return config.optional("num_key_value_heads") or num_heads


def chat_glm(config: ConfigReader, num_heads: int) -> int:
    """Read ``multi_query_group_num`` if ``multi_query_attention`` is on."""
    return own_key(config, num_heads) if config.flag("multi_query_attention") else num_heads


def attention_part(default: int | None) -> KVHeads:
    """Return a rule that reads ``kv_n_heads`` of ``attn_config``: DBRX, MPT."""

    def heads(config: ConfigReader, num_heads: int) -> int:
        return config.part("attn_config").optional("kv_n_heads") or default or num_heads

    return heads

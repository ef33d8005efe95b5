"""How many KV heads does an attention layer have?

Most configs say ``num_key_value_heads``, where ``null`` means as many as query heads. The
rules here are for those that say it otherwise.
"""

from collections.abc import Callable

from ostinato.lab.kv_config import ConfigReader

KVHeads = Callable[[ConfigReader, int], int]
"""From a config and its number of query heads to its number of KV heads."""


def own_key(config: ConfigReader, num_heads: int) -> int:
    """Read the key; ``null`` means as many as query heads."""
    return config.optional("num_key_value_heads") or num_heads


def written_down(config: ConfigReader, num_heads: int) -> int:
    """Read the key, which must be there: for families that we do not know."""
    return config.count("num_key_value_heads")


def one_each(config: ConfigReader, num_heads: int) -> int:
    """Give each query head its own, as GPT-2 and its time did."""
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

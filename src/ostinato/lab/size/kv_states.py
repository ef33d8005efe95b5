"""The states of Mamba, linear attention and convolutions.

Such layers fold the whole past into a state of constant size, one per sequence. No part of it
belongs to a single token, so a prefix can be reused only if the state was saved at exactly that
position.

Sizes are those that ``transformers`` keeps: a convolution's last ``kernel`` inputs in the
model's dtype (an engine may do with ``kernel - 1``), and the recurrence in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.core.errors import ConfigError
from ostinato.lab.size.kv_config import ConfigReader


@dataclass(frozen=True, slots=True)
class State:
    """The state of a layer, independent of the sequence's length.

    Attributes:
        name: What the layer is called.
        num_values: Numbers in the model's own dtype.
        num_float32: Numbers in float32.
    """

    name: str
    num_values: int
    num_float32: int


StateRule = Callable[[ConfigReader], State]
"""Returns a family's state from its config."""


def gated_delta(config: ConfigReader) -> State:
    """Size the state of a gated delta net: Qwen3-Next, Qwen3.5, OLMo hybrid.

    Source: Gated Delta Networks, arXiv 2412.06464.
    """
    key_heads = config.optional("linear_num_key_heads") or config.count("num_attention_heads")
    value_heads = config.optional("linear_num_value_heads") or config.count("num_attention_heads")
    key_dim = (
        config.optional("linear_key_head_dim") or 3 * config.count("hidden_size") // 4 // key_heads
    )
    value_dim = config.optional("linear_value_head_dim") or 2 * key_dim
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    convolved = channels * config.count("linear_conv_kernel_dim")
    return State("linear attention", convolved, value_heads * key_dim * value_dim)


def kimi_delta(config: ConfigReader) -> State:
    """Size the state of Kimi delta attention: one convolution each for q, k and v.

    Source: Kimi Linear, arXiv 2510.26692.
    """
    nested = config.part("linear_attn_config")
    heads = nested.optional("num_heads") or config.count("linear_num_heads")
    dim = nested.optional("head_dim") or config.count("linear_head_dim")
    kernel = nested.optional("short_conv_kernel_size") or config.count("linear_conv_kernel_dim")
    return State("linear attention", 3 * heads * dim * kernel, heads * dim * dim)


def lightning(config: ConfigReader) -> State:
    """Size the state of lightning attention: MiniMax; one matrix per head, no convolution.

    Source: MiniMax-01, arXiv 2501.08313.
    """
    heads = config.count("num_attention_heads")
    dim = config.optional("head_dim") or config.count("hidden_size") // heads
    return State("linear attention", heads * dim * dim, 0)


def mamba(config: ConfigReader) -> State:
    """Size the state of Mamba, of Falcon Mamba too. Source: arXiv 2312.00752."""
    inner = config.optional("intermediate_size") or _expanded(config, "expand")
    return _mamba(config, inner, "conv_kernel", "state_size")


def jamba(config: ConfigReader) -> State:
    """Size the state of Jamba's Mamba layers. Source: arXiv 2403.19887."""
    return _mamba(config, _expanded(config, "mamba_expand"), "mamba_d_conv", "mamba_d_state")


def mamba2(config: ConfigReader) -> State:
    """Size the state of Mamba-2. Source: arXiv 2405.21060."""
    return _mamba2(config, _expanded(config, "expand"), "conv_kernel", "state_size", "n_groups")


def bamba(config: ConfigReader) -> State:
    """Size the state of the Mamba-2 layers in Bamba, Granite 4 and Falcon-H1."""
    inner = config.optional("mamba_d_ssm") or _expanded(config, "mamba_expand")
    return _mamba2(config, inner, "mamba_d_conv", "mamba_d_state", "mamba_n_groups")


def nemotron_h(config: ConfigReader) -> State:
    """Size the state of Nemotron-H's Mamba-2 layers."""
    inner = config.count("mamba_num_heads") * config.count("mamba_head_dim")
    return _mamba2(config, inner, "conv_kernel", "ssm_state_size", "n_groups")


def short_convolution(config: ConfigReader) -> State:
    """Size the state of LFM2's convolutions: their last inputs, and nothing else."""
    return State("convolution", config.count("hidden_size") * config.count("conv_L_cache"), 0)


def gated_recurrence(config: ConfigReader) -> State:
    """Size the state of RecurrentGemma's RG-LRU. Source: Griffin, arXiv 2402.19427."""
    width = config.optional("lru_width") or config.count("hidden_size")
    return State("gated recurrence", width * (config.count("conv1d_width") - 1), width)


def _expanded(config: ConfigReader, key: str) -> int:
    """Return the inner width of a Mamba layer; the factor may be a fraction."""
    factor = config.value(key)
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0:
        raise ConfigError(f"{key}={factor!r}: must be a number above 0")
    return int(factor * config.count("hidden_size"))


def _mamba(config: ConfigReader, inner: int, kernel_key: str, size_key: str) -> State:
    return State("Mamba", inner * config.count(kernel_key), inner * config.count(size_key))


def _mamba2(
    config: ConfigReader, inner: int, kernel_key: str, size_key: str, groups_key: str
) -> State:
    """Size a Mamba-2 layer; its convolution also covers B and C, which groups share."""
    size = config.count(size_key)
    channels = inner + 2 * config.count(groups_key) * size
    return State("Mamba-2", channels * config.count(kernel_key), inner * size)

"""Default values of each model family.

A ``config.json`` may be incomplete: Gemma 3's has neither its heads nor their size, and LLaVA's
language part may be just ``{"model_type": "llama"}``. Missing values are the defaults of the
family's class in ``transformers``. The table has those of version 5.23 that affect KV; a test
compares every row with the library.

A model type that is not in the table is read by the general rule: all relevant keys must be
present, and no key may indicate something that the rule does not cover.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostinato.errors import UnsupportedModel
from ostinato.lab.size import kv_patterns as patterns
from ostinato.lab.size import kv_states as states
from ostinato.lab.size.kv_config import Config, ConfigReader
from ostinato.lab.size.kv_patterns import CHUNKED, FULL, HYBRID, LINEAR, SLIDING, Pattern

_FULL = patterns.all_of(FULL)
_NO_KV = patterns.all_of(LINEAR)
_MAYBE_SLIDING = patterns.sliding_when_set
_QWEN = patterns.sliding_above
_EVERY_FOURTH = patterns.every(4, SLIDING, key="sliding_window_pattern")
_NEXT = patterns.every(4, LINEAR, key="full_attention_interval")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        defaults: Values of missing keys, by canonical name.
        pattern: Types of the layers, if the config does not list them.
        kv_heads: Number of KV heads of a layer.
        state: State of its layers without KV; None if it has no such layers.
        own_shape: Values specific to layers of one type.
        note: Caveat of sizes computed by this rule.
    """

    defaults: Config
    pattern: Pattern = _FULL
    kv_heads: patterns.KVHeads = patterns.own_key
    state: states.StateRule | None = None
    own_shape: Callable[[ConfigReader, str], Config] = lambda config, layer_type: {}
    note: str | None = None


def family_of(config: Config) -> tuple[Family, ConfigReader]:
    """Return the family of a language model's config, and a reader with its defaults.

    Raises:
        UnsupportedModel: The size of the model's cache is unknown.
    """
    model_type = str(config.get("model_type") or "")
    family = FAMILIES.get(model_type.removesuffix("_text"))
    for key in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"):
        if config.get(key):
            raise UnsupportedModel(f"{key}={config[key]!r}: only plain decoders can be sized")
    if config.get("use_bidirectional_attention") in (True, "all"):
        raise UnsupportedModel("use_bidirectional_attention is on: such a model keeps no KV")
    if family is None:
        _refuse_hints(config, model_type)
        note = f"model_type {model_type!r} is not in our table: read by the general rule."
        family = Family({}, patterns.written_down, patterns.required_key, note=note)
    return family, ConfigReader(config, family.defaults, model_type)


def _refuse_hints(config: Config, model_type: str) -> None:
    """Refuse a config of an unknown family that has more than plain or latent attention."""
    if model_type in _REFUSED:
        raise UnsupportedModel(f"model_type={model_type!r}: {_REFUSED[model_type]}")
    for key, value in config.items():
        of_latent = key == "v_head_dim" and config.get("kv_lora_rank")
        if value and not of_latent and _HINTS.search(key):
            raise UnsupportedModel(
                f"{key}={value!r} of model_type={model_type!r}: the KV of its layers is unknown"
            )


def _gemma4(config: ConfigReader, layer_type: str) -> Config:
    """Gemma 4's full layers have wider heads, and fewer of them if K and V are one."""
    if layer_type != FULL or config.value("per_layer_config"):
        return {}
    shape: dict[str, object] = {"head_dim": config.count("global_head_dim")}
    if config.flag("attention_k_eq_v") and config.value("num_global_key_value_heads"):
        shape["num_key_value_heads"] = config.value("num_global_key_value_heads")
    return shape


def _shape(layers: int, heads: int, hidden: int, kv: int | None = None, **more: object) -> Config:
    """Return the defaults that nearly all families share."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "num_key_value_heads": kv,
        **more,
    }


def _latent(rope: int = 64, nope: int = 128, v: int | None = 128, rank: int = 512) -> Config:
    """Return the defaults of multi-head latent attention."""
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": v,
    }


def _delta(key_heads: int = 16, value_heads: int = 32, dim: int = 128) -> Config:
    """Return the defaults of a gated delta net."""
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": 4,
    }


def _mamba(state_size: int, groups: int | None = None) -> Config:
    """Return the defaults of Mamba layers among others."""
    return {
        "mamba_d_state": state_size,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": groups,
    }


def _mamba_alone(layers: int, hidden: int, state_size: int, groups: int | None = None) -> Config:
    """Return the defaults of a model of Mamba layers only."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "state_size": state_size,
        "conv_kernel": 4,
        "expand": 2,
        "n_groups": groups,
    }


_MPT_HEADS, _DBRX_HEADS = patterns.attention_part(None), patterns.attention_part(1)
_NEMOTRON_H: Config = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}  # and no number of layers: their list is their number
_KIMI = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}

# fmt: off
FAMILIES: Mapping[str, Family] = {
    # All layers attend in full.        layers heads hidden KV heads
    "apertus":          Family(_shape(32, 32, 4096)),
    "arcee":            Family(_shape(32, 32, 2560)),
    "bloom":            Family(_shape(2, 8, 64), _FULL, patterns.one_each),
    "chatglm":          Family({}, _FULL, patterns.chat_glm),
    "codegen":          Family(_shape(28, 16, 4096), _FULL, patterns.one_each),
    "cohere":           Family(_shape(40, 64, 8192)),
    "dbrx":             Family(_shape(24, 16, 2048), _FULL, _DBRX_HEADS),
    "ernie4_5":         Family(_shape(18, 16, 1024, 2, head_dim=128)),
    "ernie4_5_moe":     Family(_shape(28, 20, 2560, 4)),
    "falcon":           Family(_shape(32, 71, 4544, multi_query=True), _FULL, patterns.falcon),
    "gemma":            Family(_shape(28, 16, 3072, 16, head_dim=256)),
    "glm":              Family(_shape(40, 32, 4096, 2, head_dim=128)),
    "glm4":             Family(_shape(40, 32, 4096, 2, head_dim=128)),
    "glm4_moe":         Family(_shape(46, 96, 4096, 8)),
    "gpt2":             Family(_shape(12, 12, 768), _FULL, patterns.one_each),
    "gpt_bigcode":      Family(_shape(12, 12, 768), _FULL, patterns.big_code),
    "gpt_neox":         Family(_shape(44, 64, 6144), _FULL, patterns.one_each),
    "gptj":             Family(_shape(28, 16, 4096), _FULL, patterns.one_each),
    "granite":          Family(_shape(32, 32, 4096)),
    "granitemoe":       Family(_shape(32, 32, 4096)),
    "helium":           Family(_shape(24, 20, 2560, 20, head_dim=128)),
    "hunyuan_v1_dense": Family(_shape(32, 32, 4096)),
    "hunyuan_v1_moe":   Family(_shape(32, 32, 4096)),
    "internlm3":        Family(_shape(48, 32, 4096, 2, head_dim=128)),
    "llama":            Family(_shape(32, 32, 4096)),
    "minimax_m2":       Family(_shape(62, 48, 3072, 8, head_dim=128)),
    "mpt":              Family(_shape(24, 16, 2048), _FULL, _MPT_HEADS),
    "nemotron":         Family(_shape(32, 48, 6144)),
    "olmo":             Family(_shape(32, 32, 4096)),
    "olmo2":            Family(_shape(32, 32, 4096)),
    "olmoe":            Family(_shape(16, 16, 2048)),
    "opt":              Family(_shape(12, 12, 768), _FULL, patterns.one_each),
    "persimmon":        Family(_shape(36, 64, 4096), _FULL, patterns.one_each),
    "phi":              Family(_shape(24, 32, 2048)),
    "qwen3_vl":         Family(_shape(32, 32, 4096, 32, head_dim=128)),
    "qwen3_vl_moe":     Family(_shape(24, 16, 2048, 16, head_dim=128)),
    "seed_oss":         Family(_shape(64, 80, 4096, 8, head_dim=128)),
    "stablelm":         Family(_shape(32, 32, 2560, 32)),
    # Some layers see a window only.
    "cohere2":          Family(_shape(40, 64, 8192, sliding_window=4096), _EVERY_FOURTH),
    "exaone4":          Family(_shape(32, 32, 4096, 32, sliding_window=4096), _EVERY_FOURTH),
    "gemma2":           Family(_shape(26, 8, 2304, 4, head_dim=256, sliding_window=4096),
                               patterns.every(2, SLIDING)),
    "gemma3":           Family(_shape(26, 8, 2304, 4, head_dim=256, sliding_window=4096),
                               patterns.every(6, SLIDING, key="sliding_window_pattern")),
    "gemma3n":          Family(_shape(35, 8, 2048, 2, head_dim=256, sliding_window=512,
                                      num_kv_shared_layers=15), patterns.every(5, SLIDING)),
    "gemma4":           Family(_shape(30, 8, 2304, 4, head_dim=256, sliding_window=512,
                                      global_head_dim=512), patterns.gemma4, own_shape=_gemma4),
    "gpt_neo":          Family(_shape(24, 16, 2048, sliding_window=256), patterns.gpt_neo,
                               patterns.one_each),
    "gpt_oss":          Family(_shape(36, 64, 2880, 8, head_dim=64, sliding_window=128),
                               patterns.every(2, SLIDING)),
    "llama4":           Family(_shape(48, 40, 5120, 8, head_dim=128, attention_chunk_size=8192),
                               patterns.by_position_encoding(CHUNKED, FULL)),
    "ministral":        Family(_shape(32, 32, 4096, 8, sliding_window=4096), _MAYBE_SLIDING),
    "ministral3":       Family(_shape(34, 32, 4096, 8, head_dim=128), _MAYBE_SLIDING),
    "mistral":          Family(_shape(32, 32, 4096, 8, sliding_window=4096), _MAYBE_SLIDING),
    "mixtral":          Family(_shape(32, 32, 4096, 8), _MAYBE_SLIDING),
    "olmo3":            Family(_shape(32, 32, 4096, sliding_window=4096), _EVERY_FOURTH),
    "phi3":             Family(_shape(32, 32, 3072), _MAYBE_SLIDING),
    "phi4_multimodal":  Family(_shape(32, 32, 3072, 8), _MAYBE_SLIDING),
    "phimoe":           Family(_shape(32, 32, 4096, 8), _MAYBE_SLIDING),
    "qwen2":            Family(_shape(32, 32, 4096, 32, sliding_window=4096,
                                      max_window_layers=28), _QWEN),
    "qwen2_moe":        Family(_shape(24, 16, 2048, 16, sliding_window=4096,
                                      max_window_layers=28), patterns.sliding_below_alternating),
    "qwen2_vl":         Family(_shape(80, 64, 8192, 8, sliding_window=4096,
                                      max_window_layers=80), _QWEN),
    "qwen2_5_vl":       Family(_shape(80, 64, 8192, 8, sliding_window=4096,
                                      max_window_layers=80), _QWEN),
    "qwen3":            Family(_shape(32, 32, 4096, 32, head_dim=128, sliding_window=4096,
                                      max_window_layers=28), _QWEN),
    "qwen3_moe":        Family(_shape(24, 32, 2048, 4, sliding_window=4096),
                               patterns.sliding_when_used),
    "smollm3":          Family(_shape(36, 16, 2048, 4), patterns.smollm3),
    "starcoder2":       Family(_shape(30, 24, 3072, 2), _MAYBE_SLIDING),
    # Latent attention.
    "deepseek_v2":      Family(_shape(32, 32, 4096, None, **_latent())),
    "deepseek_v3":      Family(_shape(61, 128, 7168, 128, **_latent())),
    "deepseek_v32":     Family(_shape(61, 128, 7168, 128, **_latent(), index_head_dim=128)),
    "glm4_moe_lite":    Family(_shape(47, 20, 2048, 20, **_latent(nope=192, v=256))),
    "minicpm3":         Family(_shape(62, 40, 2560, 40, **_latent(32, 64, None, 256))),
    # Some layers, or all, keep a state instead of KV.
    "bamba":            Family(_shape(32, 32, 4096, 8, **_mamba(256, 1)), patterns.by_index,
                               state=states.bamba),
    "falcon_h1":        Family(_shape(32, 32, 4096, 8, **_mamba(256, 1), mamba_d_ssm=1024),
                               patterns.all_of(HYBRID), state=states.bamba),
    "falcon_mamba":     Family(_mamba_alone(32, 768, 16), _NO_KV, state=states.mamba),
    "granitemoehybrid": Family(_shape(32, 32, 4096, None, **_mamba(256, 1)), _NO_KV,
                               state=states.bamba),
    "jamba":            Family(_shape(32, 32, 4096, 8, **_mamba(16), attn_layer_period=8,
                                      attn_layer_offset=4), patterns.periodic, state=states.jamba),
    "kimi_linear":      Family(_shape(27, 32, 2304, 32, **_latent(), **_KIMI),
                               patterns.kimi_linear, state=states.kimi_delta),
    "lfm2":             Family(_shape(32, 32, 2560, 8, conv_L_cache=3), patterns.lfm2,
                               state=states.short_convolution),
    "mamba":            Family(_mamba_alone(32, 768, 16), _NO_KV, state=states.mamba),
    "mamba2":           Family(_mamba_alone(64, 4096, 128, 8), _NO_KV, state=states.mamba2),
    "minimax":          Family(_shape(32, 32, 4096, 8), patterns.minimax, state=states.lightning),
    "nemotron_h":       Family(_NEMOTRON_H, patterns.nemotron_h, state=states.nemotron_h),
    "olmo_hybrid":      Family(_shape(32, 30, 3840, linear_conv_kernel_dim=4), _NEXT,
                               state=states.gated_delta),
    "qwen3_5":          Family(_shape(32, 16, 4096, 4, head_dim=256, **_delta()), _NEXT,
                               state=states.gated_delta),
    "qwen3_5_moe":      Family(_shape(40, 16, 2048, 2, head_dim=256, **_delta()), _NEXT,
                               state=states.gated_delta),
    "qwen3_next":       Family(_shape(48, 16, 2048, 2, head_dim=256, **_delta()), _NEXT,
                               state=states.gated_delta),
    "recurrent_gemma":  Family(_shape(26, 10, 2560, sliding_window=2048, conv1d_width=4),
                               patterns.recurrent_gemma, state=states.gated_recurrence),
}
# fmt: on

_REFUSED = {
    "longcat_flash": "each of its layers has two attention layers, which are not told apart",
}

_HINTS = re.compile(
    r"mamba|ssm|conv|recurrent|state_size|lru_|rwkv|linear_(attn|num|key|value|head)|cross_"
    r"|encoder_layers|compress|swa_|v_head_dim|index_|indexer|use_cla|cla_share|block_configs"
    r"|mb_per_layer|lightning|multi_query|global_attn|sparse_attention"
)
"""Keys that indicate layers which the general rule does not cover."""

"""Checks that a quantized checkpoint computes each token by itself.

Quantized weights are weights. Quantized *activations* are scaled by what they hold, and a scale
that is taken over several rows makes a token's keys depend on which other requests are in the step:

=====================================  =======  ==================================================
scheme                                 served   because
=====================================  =======  ==================================================
weights only (GPTQ, AWQ, W4A16, nf4)   yes      activations are not touched
activations, static scales             yes      the scale was calibrated and is in the checkpoint
activations, dynamic, by token         yes      the scale follows from the row alone
activations, dynamic, by tensor        no       the scale is the largest of all rows of the step
LLM.int8 (bitsandbytes, 8 bits)        no       columns are kept in 16 bits if *any* row has an
                                                outlier there
keys and values (``kv_cache_scheme``)  no       the cache has a format of its own
=====================================  =======  ==================================================

What configs say is refused here, before weights are read; ``row_watch`` tries out the rest.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from ostinato.errors import UnsupportedModel
from ostinato.runner.row_watch import quantization_settings
from ostinato.runner.word_codes import why_unread


def check_quantization(config: PreTrainedConfig) -> None:
    """Refuse schemes that are not read, or in which a token's keys depend on others of the step.

    Raises:
        UnsupportedModel: Saying why, and what to load instead.
    """
    for settings in quantization_settings(config):
        reason = why_unread(settings) or _batch_dependence(settings)
        if reason is not None:
            raise UnsupportedModel(f"{config.model_type}, quantized by {reason}")


def _batch_dependence(settings: Mapping[str, Any]) -> str | None:
    """Say which scheme mixes rows and why it cannot be served; None if none is known to."""
    method = str(settings.get("quant_method", ""))
    if method.startswith("bitsandbytes") and settings.get("load_in_8bit"):
        return (
            "LLM.int8 (bitsandbytes, load_in_8bit): which columns of activations stay in 16 bits "
            "depends on all tokens of a step, so that keys depend on other requests and no "
            "prefix can be shared; load the unquantized checkpoint, or one in 4 bits"
        )
    if settings.get("kv_cache_scheme"):
        return (
            f"{method}, brings a format of keys and values (kv_cache_scheme), which the cache "
            "does not keep: remove it from quantization_config, and set kv_cache_dtype, to 'int8' "
            "for 8 bits"
        )
    if any(_is_dynamic_by_tensor(group) for group in _activations(settings)):
        return (
            f"{method}, scales activations dynamically over the whole tensor, which are all "
            "tokens of a step, so that keys depend on other requests and no prefix can be "
            "shared; quantize with dynamic scales per token, or with static ones"
        )
    return None


def _activations(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield how the groups of a compressed-tensors config quantizes activations."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for name in ("input_activations", "output_activations"):
            if isinstance(group, Mapping) and isinstance(group.get(name), Mapping):
                yield group[name]


def _is_dynamic_by_tensor(activations: Mapping[str, Any]) -> bool:
    # "local" is dynamic within groups of a row, under a static scale of the tensor.
    return activations.get("dynamic") is True and activations.get("strategy") == "tensor"

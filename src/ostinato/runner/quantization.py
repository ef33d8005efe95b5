"""Checks that a quantized checkpoint computes each token independently of the others.

Quantized weights do no harm. Quantized *activations* have scales, and a scale that is shared by
several rows makes a token's keys depend on the other requests of the step:

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

Configs are checked before weights are read. After that, every layer of a quantized checkpoint is
called twice, the second time with other rows beside the first.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ostinato.errors import UnsupportedModel
from ostinato.runner.settings import GROUP_STEP

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTEAD = "load the unquantized checkpoint with quantization='int4' or 'int8'"

_LOUDER = 64.0
"""Factor on the other rows; it turns their numbers into outliers."""

_MAX_DIFFERENCE = 1e-3
"""Relative to the row: less than half a step of 8 bits, more than the order of sums explains in
float32. In 16 bits one unit in the last place is allowed instead."""


def quantization_settings(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the quantization settings of a config: of the whole, or of its text model."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if settings is not None:
            yield settings if isinstance(settings, Mapping) else settings.to_dict()


def check_quantization(config: PreTrainedConfig) -> None:
    """Refuse schemes that are not supported, or in which a token's keys depend on others.

    Raises:
        UnsupportedModel: With the reason, and what to load instead.
    """
    for settings in quantization_settings(config):
        reason = _unsupported_words(settings) or _batch_dependence(settings)
        if reason is not None:
            raise UnsupportedModel(f"{config.model_type}, quantized by {reason}")


def _unsupported_words(settings: Mapping[str, Any]) -> str | None:
    """Return what is not supported in a config of GPTQ or AWQ, and what is; None if all is."""
    method = settings.get("quant_method")
    if method not in ("gptq", "awq"):
        return None
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        return f"{method.upper()} in {bits} bits: only 4 (GPTQ: also 8) are run; {INSTEAD}"
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if isinstance(size, int) and size != -1 and size % GROUP_STEP:
        return (
            f"{method.upper()} in groups of {size}: sizes are multiples of {GROUP_STEP}, or -1; "
            f"{INSTEAD}"
        )
    known = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}[method]
    own = settings.get("checkpoint_format", settings.get("format", settings.get("version")))
    if own is not None and str(own).lower() not in known:
        return f"{method.upper()} laid out as {own!r}: read are {', '.join(known)}; {INSTEAD}"
    return None


def _batch_dependence(settings: Mapping[str, Any]) -> str | None:
    """Return which scheme mixes rows and why it cannot be served; None if none is known to."""
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
    """Yield how the groups of a compressed-tensors config quantize activations."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        for name in ("input_activations", "output_activations"):
            if isinstance(group, Mapping) and isinstance(group.get(name), Mapping):
                yield group[name]


def _is_dynamic_by_tensor(activations: Mapping[str, Any]) -> bool:
    # "local" is dynamic within groups of a row, under a static scale of the tensor.
    return activations.get("dynamic") is True and activations.get("strategy") == "tensor"


def change_by_neighbours(module: nn.Module, rows: Tensor, output: Tensor) -> float | None:
    """Return by how much a layer's output for a row changes when the other rows change.

    Args:
        module: Maps rows to rows.
        rows: Its input, shape (..., num_rows, num_inputs), two rows at least.
        output: Its output.

    Returns:
        Relative to the row; None if rounding explains it.
    """
    others = rows * _LOUDER
    others[..., 0, :] = rows[..., 0, :]
    before, after = output[..., 0, :].double(), module(others)[..., 0, :].double()
    change = float((after - before).norm() / before.norm().clamp(min=1e-30))
    allowed = max(_MAX_DIFFERENCE, torch.finfo(output.dtype).eps)
    return None if change <= allowed else change


@contextmanager
def check_rows(model: "PreTrainedModel") -> Iterator[None]:
    """Check the layers of a quantized model while it is called; others are not checked.

    Each layer without layers inside that maps rows to rows is called once more, with the same input
    but larger other rows.

    Raises:
        UnsupportedModel: A row's output changes.
    """
    handles: list[Any] = []
    if any(True for _ in quantization_settings(model.config)):
        modules = [(name, module) for name, module in model.named_modules() if not module._modules]
        handles = [module.register_forward_hook(_row_check(name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _row_check(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """Return a forward hook that checks a layer."""
    is_inside = False

    def check(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal is_inside
        if is_inside or not _maps_rows(inputs, output):
            return
        is_inside = True
        try:
            change = change_by_neighbours(module, inputs[0], output)
        finally:
            is_inside = False
        if change is not None:
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) computes a token differently when other "
                f"tokens of the step change (by {change:.2g} of its size): its activations are "
                "quantized by batch, so that no prefix can be shared"
            )

    return check


def _maps_rows(inputs: tuple[Any, ...], output: Any) -> bool:
    """Return whether a call took one tensor of several rows and returned as many."""
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        return False
    rows: Tensor = inputs[0]
    return (
        rows.is_floating_point()
        and rows.ndim >= 2
        and rows.shape[-2] >= 2
        and output.shape[:-1] == rows.shape[:-1]
    )

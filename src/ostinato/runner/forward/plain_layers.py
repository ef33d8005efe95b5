"""Checks that a layer is unmodified, and may be replaced.

Quantizers, adapters and offloading change layers in place: a subclass, another kind of tensor,
scales beside the weight, hooks, a ``forward`` of the instance's own. Their type may still be
``nn.Linear``. Such a layer is left to compute itself.
"""

from typing import TypeGuard

from torch import Tensor, nn

from ostinato.runner.native.ctypes_api import DTYPES

_PARTS = {"weight", "bias"}


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Say whether a module multiplies by its weight, adds its bias, and does nothing else."""
    return (
        type(module) is nn.Linear
        and is_unaltered(module)
        and module._parameters.keys() <= _PARTS
        and not module._buffers
        and not module._modules
        and all(map(_is_plain, (module.weight, module.bias)))
        and module.weight.numel() > 0
    )


def is_unaltered(module: nn.Module) -> bool:
    """Say whether calling a module runs its class's ``forward``, with no hooks around it."""
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return "forward" not in vars(module) and not any(hooks)


def _is_plain(parameter: Tensor | None) -> bool:
    """Say whether a parameter holds its numbers itself, in a format that is computed in."""
    return parameter is None or (type(parameter) is nn.Parameter and parameter.dtype in DTYPES)

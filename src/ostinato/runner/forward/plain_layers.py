"""Checks that a linear layer is unmodified, so that it may be replaced; and creates such layers.

Quantizers, adapters and offloading change layers in place: a subclass, another kind of tensor,
scales beside the weight, hooks, a ``forward`` on the instance. Their type may still be
``nn.Linear``. Such layers are not replaced.
"""

from typing import TypeGuard

from torch import Tensor, nn

from ostinato.runner.native.ctypes_api import DTYPES
from ostinato.runner.states.mixers import is_ours

_PARTS = {"weight", "bias"}


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Return whether a module only multiplies by its weight and adds its bias."""
    return (
        type(module) is nn.Linear
        and is_unaltered(module)
        and module._parameters.keys() <= _PARTS
        and not module._buffers
        and not module._modules
        and all(map(_is_plain, (module.weight, module.bias)))
        and module.weight.numel() > 0
    )


def is_unaltered(module: nn.Module, may_be_bound: bool = False) -> bool:
    """Return whether calling a module runs its class's ``forward``, without hooks.

    Args:
        module: The module.
        may_be_bound: Whether hooks and a ``forward`` of ours count as none, see ``ModelCall``.
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    replaced = [forward] if (forward := vars(module).get("forward")) is not None else []
    return all(may_be_bound and is_ours(each) for each in (*hooks, *replaced))


def plain_linear(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    """Return a linear layer of a weight, which it shares if it is a parameter."""
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight.shape
    is_parameter = isinstance(weight, nn.Parameter)
    linear.weight = weight if is_parameter else nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", bias)
    return linear.eval()


def _is_plain(parameter: Tensor | None) -> bool:
    """Return whether a parameter is no subclass, and has a supported dtype."""
    return parameter is None or (type(parameter) is nn.Parameter and parameter.dtype in DTYPES)

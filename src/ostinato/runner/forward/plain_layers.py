"""Checks that a linear layer is unmodified, so that it may be replaced; and creates such layers.

Quantizers, adapters and offloading change layers in place: a subclass, another kind of tensor,
scales beside the weight, hooks, a ``forward`` on the instance. Their type may still be
``nn.Linear``. Such layers are not replaced.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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


class WideProducts(TorchFunctionMode):
    """Within it, linear layers of 16 bits multiply in float32, and round once.

    A processor without instructions for these formats takes several times as long for them. Each
    weight is converted once, and kept as long as the mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply, or call any other function as it is."""
        is_product = func is nn.functional.linear and not kwargs and len(args) == 3
        if not is_product or args[0].dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **(kwargs or {}))
        rows, weight, bias = args
        if id(weight) not in self._wide:
            self._wide[id(weight)] = weight, weight.float()
        wide = func(rows.float(), self._wide[id(weight)][1], None if bias is None else bias.float())
        return wide.to(rows.dtype)

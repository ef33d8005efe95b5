"""Frequencies and angles of RoPE with the same bits on every system.

``torch`` computes powers, cosines and sines by other code on each instruction set, so that some
of them differ in the last bit. Within ``ExactFunctions`` a model's own module computes powers that
are rounded right, and cosines and sines from the native library, which are made of additions and
products of doubles alone.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ostinato.runner.native.library import library

_LARGEST = 1e6
"""Larger angles are those of ``torch``."""


class ExactFunctions(TorchFunctionMode):
    """Replaces powers, cosines and sines of float32 on a CPU, as long as it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or ours in its place."""
        own = _FUNCTIONS.get(func)
        result = None if own is None or kwargs else own(*args)
        return func(*args, **(kwargs or {})) if result is None else result


def settle_frequencies(rotary: nn.Module | None) -> None:
    """Give a module for RoPE the frequencies that it has where powers are rounded right.

    Args:
        rotary: Of ``transformers``, made from its ``config``; any other stays as it is, and so do
            frequencies that are not those of the config.

    Effects: changes its buffers by a unit in the last place, if at all.
    """
    config = getattr(rotary, "config", None)
    if rotary is None or config is None or not hasattr(rotary, "rope_type"):
        return
    plain = type(rotary)(config)
    with ExactFunctions():
        exact = type(rotary)(config)
    for (name, own), given, settled in zip(
        rotary.named_buffers(), plain.buffers(), exact.buffers(), strict=True
    ):
        if own.device.type == "cpu" and torch.equal(own, given.to(own)):
            setattr(rotary, name, settled.to(own))


def _is_plain(numbers: Any) -> bool:
    is_tensor = isinstance(numbers, Tensor) and type(numbers) in (Tensor, nn.Parameter, nn.Buffer)
    return is_tensor and numbers.dtype == torch.float32 and numbers.device.type == "cpu"


def _power(exponents: Any, base: Any) -> Tensor | None:
    if not _is_plain(exponents) or not isinstance(base, (int, float)) or base <= 0:
        return None
    context, exact = Context(prec=40), Decimal(torch.tensor(float(base)).item())
    powers = [
        float(context.power(exact, Decimal(exponent))) for exponent in exponents.flatten().tolist()
    ]
    return torch.tensor(powers, dtype=torch.float32).reshape(exponents.shape)


def _turned(angles: Any, is_sine: bool) -> Tensor | None:
    native = library()
    if native is None or not _is_plain(angles) or not (angles.abs() <= _LARGEST).all():
        return None
    angles = angles.contiguous()
    turned = torch.empty_like(angles)
    places = (None, turned.data_ptr()) if is_sine else (turned.data_ptr(), None)
    native.ost_turns(angles.data_ptr(), *places, angles.numel())
    return turned


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.Tensor.__rpow__: _power,
    torch.pow: lambda base, exponents: _power(exponents, base),
    **dict.fromkeys((torch.cos, torch.Tensor.cos), lambda angles: _turned(angles, False)),
    **dict.fromkeys((torch.sin, torch.Tensor.sin), lambda angles: _turned(angles, True)),
}

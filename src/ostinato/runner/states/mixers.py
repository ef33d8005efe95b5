"""Makes a model's layers with a state compute each sequence separately.

The code of ``transformers`` is not changed. A mixer gets a copy of its own ``forward`` in which the
names of the functions that carry a state refer to ours; outside of a step, ours call theirs.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

from ostinato.runner.states.recurrence import MixerCall, Recurrence
from ostinato.runner.states.recurrences import RECURRENCES, LightningAttention
from ostinato.runner.states.step import LayerStates

CurrentStates = Callable[[], LayerStates | None]
"""Returns the states of the current step; None if the model computes without them."""


def is_ours(function: object) -> bool:
    """Return whether a hook or a ``forward`` passes steps to modules, and nothing else."""
    return bool(getattr(getattr(function, "__func__", function), "_passes_steps", False))


def passes_steps(function: Callable[..., Any]) -> Any:
    """Mark a function as one of those of ``is_ours``."""
    function._passes_steps = True  # type: ignore[attr-defined]
    return function


def bind_mixers(model: nn.Module, current: CurrentStates) -> None:
    """Bind the layers of a model that carry a state to the states of the current step.

    Args:
        model: Its layers with a state have an index (``layer_idx``).
        current: Called in each call of a layer.

    Effects: replaces the ``forward`` of those layers, on the instances only.
    """
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        forward = inspect.unwrap(type(module).forward)
        if isinstance(layer, int) and isinstance(forward, FunctionType):
            _bind(module, layer, forward, current)


def _bind(module: nn.Module, layer: int, forward: FunctionType, current: CurrentStates) -> None:
    """Replace the functions with a state that a module's ``forward`` calls, if there are any."""
    names = set(forward.__code__.co_names)
    if LightningAttention.name in names:
        whole = MethodType(forward, module)
        module.forward = _carried(whole, layer, LightningAttention(), {}, current)
        return
    own = {name: forward.__globals__.get(name) for name in names & RECURRENCES.keys()}
    replaced = {
        name: _carried(function, layer, RECURRENCES[name], forward.__globals__, current)
        for name, function in own.items()
        if callable(function)
    }
    if replaced:
        module.forward = MethodType(_with_globals(forward, replaced), module)


def _carried(
    function: Callable[..., Any],
    layer: int,
    recurrence: Recurrence,
    siblings: dict[str, Any],
    current: CurrentStates,
) -> Callable[..., Any]:
    """Return the replacement of a function that carries a state."""
    names = tuple(inspect.signature(function).parameters)

    def carried(*arguments: Any, **keywords: Any) -> Any:
        call = MixerCall(function, arguments, keywords, names, siblings)
        states = current()
        if states is None:
            return call.run()
        output = states.carry(layer, recurrence, call)
        return (output, None) if recurrence.gives_state else output

    return cast(Callable[..., Any], passes_steps(carried))


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function with some global names replaced."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast(FunctionType, passes_steps(copy))

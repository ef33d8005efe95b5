"""The interface of a function that carries a state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

State = Tensor
"""Shape (num_sequences, ...)."""


@dataclass(frozen=True, slots=True)
class MixerCall:
    """A mixer's call of such a function.

    Attributes:
        function: The function.
        arguments: Arguments by position.
        keywords: Arguments by name.
        names: Names of the arguments by position.
        siblings: Functions of the same module, by name.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    names: tuple[str, ...]
    siblings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return an argument; None if it is not given."""
        given = dict(zip(self.names, self.arguments, strict=False))
        return given[name] if name in given else self.keywords.get(name)

    def run(self, **others: Any) -> Any:
        """Call the function, with some keywords added or replaced."""
        return self.function(*self.arguments, **{**self.keywords, **others})

    def changed(self, change: Callable[[str, Any], Any]) -> "MixerCall":
        """Return the call with ``change(name, value)`` in place of every argument."""
        pairs = zip(self.names, self.arguments, strict=False)
        return replace(
            self,
            arguments=tuple(change(name, value) for name, value in pairs),
            keywords={name: change(name, value) for name, value in self.keywords.items()},
        )


class Recurrence(ABC):
    """A function that carries a state along tokens.

    Attributes:
        name: Its name in the modules of ``transformers``.
        axes: The token dimension of each argument that has one.
        output_axis: The token dimension of the output.
        gives_state: Whether it always returns a state beside the output.
    """

    name: ClassVar[str]
    axes: ClassVar[Mapping[str, int]]
    output_axis: ClassVar[int] = 1
    gives_state: ClassVar[bool] = False

    @abstractmethod
    def chunk(self, call: MixerCall, state: State | None) -> tuple[Tensor, State]:
        """Compute some tokens of sequences of one length.

        Args:
            call: The mixer's call, cut to these tokens.
            state: The state before them; None at the beginning of the sequences.

        Returns:
            The output and the state after the last token.
        """

    def step(self, call: MixerCall, states: State) -> tuple[Tensor, State]:
        """Compute one token of each of several sequences; like ``chunk``."""
        return self.chunk(call, states)

    def step_slots(self, call: MixerCall, states: Tensor, slots: Tensor) -> Tensor:
        """Compute one token of each of several sequences on the states in their slots.

        Args:
            call: The mixer's call, cut to these tokens.
            states: States of all slots, shape (num_slots, ...).
            slots: Slots of these sequences, shape (num_sequences,), int64.

        Effects: overwrites the states of those slots.
        """
        if len(slots) == 1 and slots.device.type == "cpu":  # megabytes that need no copy
            own = states.narrow(0, int(slots), 1)
            output, after = self.step(call, own)
            if after is not own:
                own.copy_(after)
            return output
        output, after = self.step(call, states.index_select(0, slots))
        states.index_copy_(0, slots, after.to(states.dtype))
        return output

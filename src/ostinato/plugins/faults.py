"""Calls a plug-in while the engine serves: what it raises is logged once and answered for it."""

import logging
from collections.abc import Callable
from typing import TypeVar

ValueT = TypeVar("ValueT")

_log = logging.getLogger(__name__)


class FaultCounter:
    """Counts what a plug-in did wrong; logs the first of each method.

    Attributes:
        name: Of the plug-in.
        num_faults: So far.
        first: The first of them, in words; empty if there is none.
    """

    def __init__(self, name: str) -> None:
        """Begin without a fault of a plug-in, by its name."""
        self.name = name
        self.num_faults, self.first = 0, ""
        self._logged: set[str] = set()

    def call(self, what: str, call: Callable[[], ValueT], otherwise: ValueT) -> ValueT:
        """Return what a call returns, or something else if it raises."""
        try:
            return call()
        except Exception as error:
            self.note(what, f"raises {type(error).__name__}: {error}")
            return otherwise

    def note(self, what: str, fault: str) -> None:
        """Count a fault of one method."""
        self.num_faults += 1
        self.first = self.first or f"{what} {fault}"
        if what not in self._logged:
            self._logged.add(what)
            _log.warning("plug-in %s: %s %s (logged once)", self.name, what, fault)

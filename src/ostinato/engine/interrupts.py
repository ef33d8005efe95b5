"""Defers Ctrl-C to moments at which the engine is consistent.

Python raises ``KeyboardInterrupt`` between any two instructions; in the middle of a plan or a
commit that would leak blocks. So while a batch runs, Ctrl-C is raised

* at once within a forward pass, which may take long: the engine ends that step as failed;
* anywhere else at the next ``check``.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class DeferredSigint:
    """Raises Ctrl-C only where it is safe; a context manager.

    Acts in the main thread, which is the only one that gets signals, and only where Python's own
    handler is installed: a program's handler is left alone.
    """

    def __init__(self, may_raise: Callable[[], bool]) -> None:
        """Take a function that tells whether an exception may be raised at once."""
        self._may_raise = may_raise
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> "DeferredSigint":
        """Replace Python's handler, if it is installed."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore Python's handler.

        Raises:
            KeyboardInterrupt: One is pending, and nothing else is being raised.
        """
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise a pending Ctrl-C.

        Raises:
            KeyboardInterrupt: One is pending.
        """
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._may_raise():
            raise KeyboardInterrupt
        self._is_pending = True

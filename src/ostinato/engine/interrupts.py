"""How does Ctrl-C end a batch without tearing the engine?

Python raises ``KeyboardInterrupt`` between any two instructions. In the middle of a plan or a
commit that would leave blocks that nobody gives back. So while a batch runs, Ctrl-C is raised

* at once within a forward pass, which may take long: the engine ends that step as a failed one;
* anywhere else when nothing is half done, at the next ``check``.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class DeferredSigint:
    """Lets Ctrl-C in where it does no harm; a context manager.

    It stands in the main thread, which is the only one that gets signals, and only where
    Python's own handler is installed: any other is the program's own affair.
    """

    def __init__(self, may_raise: Callable[[], bool]) -> None:
        """Ask ``may_raise`` whether an exception may be raised at once."""
        self._may_raise = may_raise
        self._is_pending = False
        self._stands = False

    def __enter__(self) -> "DeferredSigint":
        """Take the place of Python's handler, if it is there."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._stands = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the place back.

        Raises:
            KeyboardInterrupt: It came late, and nothing else is being raised.
        """
        if self._stands:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def check(self) -> None:
        """Let a Ctrl-C in that came while something was half done.

        Raises:
            KeyboardInterrupt: There was one.
        """
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._may_raise():
            raise KeyboardInterrupt
        self._is_pending = True

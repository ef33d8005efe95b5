"""Fixtures of the command line's tests."""

from .engine_watch import watch
from .terminal import terminal

__all__ = ["terminal", "watch"]

"""Fixtures of the command line's tests."""

from tests.support.model_pool import pooled_models, use_pool

from .engine_watch import watch
from .terminal import terminal

__all__ = ["pooled_models", "terminal", "use_pool", "watch"]

"""Fixtures of the command line's tests."""

from tests.cli.engine_watch import watch
from tests.cli.terminal import terminal
from tests.support.models.model_pool import pooled_models, use_pool

__all__ = ["pooled_models", "terminal", "use_pool", "watch"]

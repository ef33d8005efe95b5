"""Earlier place of ``ostinato.testing.conformance``, for one release: use that in new code."""

from ostinato.testing.conformance import CHECKS, Check, Medium, StormReport, check, run, storm

__all__ = ["CHECKS", "Check", "Medium", "StormReport", "check", "run", "storm"]

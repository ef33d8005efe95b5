"""Marks in a prompt up to which it is kept: OpenAI's breakpoints, and ``cache_control``."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ostinato.protocol.body import OpenBody
from ostinato.tenants.terms import ANTHROPIC_1H, ANTHROPIC_5M, LeaseTerms

MAX_KEPT_MARKS = 4
"""Marks of one request that are leased: the last ones, as OpenAI writes them."""

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
_MAX_TTL_S = 24 * 3600


def seconds_of(ttl: str) -> float:
    """Return the seconds of a time such as ``30m``."""
    return float(ttl[:-1]) * _UNIT_SECONDS[ttl[-1]]


def _check_max_ttl(ttl: str) -> str:
    """Refuse a time that is zero or longer than the longest lease that clients get."""
    if not 0 < seconds_of(ttl) <= _MAX_TTL_S:
        raise ValueError(f"ttl={ttl!r}: must be above 0 and at most 24h")
    return ttl


Ttl = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,6}[smh]$"), AfterValidator(_check_max_ttl)
]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A position up to which the prompt is kept.

    Attributes:
        num_blocks: Pieces of the conversation before it; 0 is after the tools.
        terms: For how long.
    """

    num_blocks: int
    terms: LeaseTerms


class CacheControl(OpenBody):
    """Keep the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = Field(
        default="5m", description="How long; each use restarts the time."
    )

    @property
    def terms(self) -> LeaseTerms:
        """The terms of the lease."""
        return ANTHROPIC_1H if self.ttl == "1h" else ANTHROPIC_5M


class CacheBreakpoint(OpenBody):
    """OpenAI's mark: keep the prompt up to the end of this part."""

    mode: Literal["explicit"] = "explicit"
    ttl: Ttl | None = Field(default=None, description="By default that of the request, or 30m.")


class MarkedPart(OpenBody):
    """A part that may have a mark."""

    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheControl | None = Field(
        default=None, description="Anthropic's mark, as gateways send it."
    )

    def terms(self, ttl: str) -> LeaseTerms | None:
        """Return for how long the prompt up to here is kept; None without a mark."""
        if self.prompt_cache_breakpoint is not None:
            time_s = seconds_of(self.prompt_cache_breakpoint.ttl or ttl)
            return LeaseTerms(time_s, refresh_on_hit=True)
        return None if self.cache_control is None else self.cache_control.terms


def breakpoints_of(terms: Iterable[LeaseTerms | None]) -> list[Breakpoint]:
    """Return the last marks of the pieces of a conversation, in order."""
    marked = [Breakpoint(place, mark) for place, mark in enumerate(terms, 1) if mark is not None]
    return marked[-MAX_KEPT_MARKS:]

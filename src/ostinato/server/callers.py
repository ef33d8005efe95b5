"""Who is calling, and what may they do?

Without keys there is one anonymous caller, and the server listens on loopback only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request

from ostinato.core.tenancy import narrow_salt


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever stands behind a request.

    Attributes:
        tenant: Its name, for statistics and logs; empty for the anonymous caller.
        salt: What separates its cache from everybody else's.
        priority: Of its requests; lower goes first.
        may_go_first: Whether a request may ask for less than ``priority``.
        may_administer: Whether it may use the administration.
    """

    tenant: str = ""
    salt: str = ""
    priority: int = 0
    may_go_first: bool = False
    may_administer: bool = False

    def narrow(self, cache_salt: str) -> str:
        """Return the salt of a request that brings one of its own.

        The caller's own comes first, so a request can never reach what belongs to another caller.
        """
        return narrow_salt(self.salt, cache_salt)


ANONYMOUS = Caller(may_go_first=True, may_administer=True)
"""Everybody, where there are no keys: whoever reaches loopback may do as they like."""


class Callers(Protocol):
    """Tells callers apart."""

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return who sent these headers.

        Raises:
            ApiError: Nobody that is known (401).
        """
        ...


class AnyCaller:
    """Takes everybody for the one anonymous caller."""

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the anonymous caller, whatever key is sent; clients insist on sending one."""
        return ANONYMOUS


def require_caller(request: Request) -> Caller:
    """Return who is calling; a dependency of every route but health.

    Raises:
        ApiError: Nobody that is known (401).
    """
    callers: Callers = request.app.state.server.callers
    return callers.identify(request.headers)


CallerOfRequest = Annotated[Caller, Depends(require_caller)]
"""Write ``caller: CallerOfRequest`` in the signature of a route."""

"""May a web page of somebody else speak to this server?

Where there are no keys, being on this machine is the only proof of identity, and a browser on
this machine runs the pages of strangers. Such a page can send requests to loopback under its own
name (DNS rebinding), and then the ``Host`` header is that name; or across sites, and then
``Origin`` is. Both are refused. With keys, the key is the proof.

Source: Jackson et al., Protecting Browsers from DNS Rebinding Attacks (CCS 2007).
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.server.config import is_loopback
from ostinato.server.errors import ApiError, response_of


class HostGuard:
    """Lets in who speaks to this machine under one of its own names."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str] = ()) -> None:
        """Stand before an application without keys; pages of allowed origins may call it."""
        self._app = app
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            for name, prefix in ((b"host", "//"), (b"origin", "")):
                value = headers.get(name, b"").decode("latin-1")
                is_allowed = name == b"origin" and self._allows(value)
                if value and not is_allowed and not _is_of_this_machine(prefix + value):
                    error = _stranger(name.decode().capitalize(), value)
                    await response_of(scope["path"], error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _allows(self, origin: str) -> bool:
        return origin in self._allowed_origins or "*" in self._allowed_origins


def _is_of_this_machine(address: str) -> bool:
    """Whether an address, with or without a port, is one that only this machine reaches."""
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:  # no address at all
        return False


def _stranger(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header}: {value:.200} is no name of this machine, and without keys that is all a caller "
        "has to show: call http://127.0.0.1, or give the server a keys file",
        kind="permission_error",
        code="foreign_host",
    )

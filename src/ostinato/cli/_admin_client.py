"""A client for the routes of a running server or router."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ostinato.core.errors import OstinatoError

if TYPE_CHECKING:
    from httpx import Response

_TIMEOUT_S = 600
"""Prewarming a long prompt is slow."""


class AdministrationFailed(OstinatoError):
    """The server refused, or could not be reached."""


class NoServer(AdministrationFailed):
    """Nothing answers at the address."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls the routes of a server.

    Attributes:
        url: URL of the server, such as ``http://127.0.0.1:8000``.
        key: An administrator's key, or that of the tenant whose request is explained; None for a
            server without keys.
        start: The command that starts one.
    """

    url: str
    key: str | None = None
    start: str = "ostinato serve"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a route, and return its JSON.

        Raises:
            NoServer: It could not be reached.
            AdministrationFailed: The server refused.
        """
        import httpx  # imported here: other commands start faster without it

        url = f"{self.url.rstrip('/')}/{path}"
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            answer = httpx.request(
                method, url, json=body, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
            )
            if answer.is_error:
                raise AdministrationFailed(_reason(answer))
            content: dict[str, Any] = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoServer(
                f"url={self.url!r}: no server answers ({error}); give another --url, or "
                f"start one with {self.start!r}"
            ) from error
        return content


def _reason(answer: "Response") -> str:
    """Return the server's message, with a hint for a missing key."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {answer.status_code} {answer.reason_phrase}"
    if answer.status_code == 401:
        return f"{message}; give --key, or set OSTINATO_ADMIN_KEY"
    return message

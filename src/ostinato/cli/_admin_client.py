"""A client for ``/admin`` routes, with the standard library only."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from ostinato.core.errors import OstinatoError

_PATIENCE_S = 600
"""Prewarming a long prompt is slow."""


class AdministrationFailed(OstinatoError):
    """The server refused, or could not be reached."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls the ``/admin`` routes of a server.

    Attributes:
        url: URL of the server, such as ``http://127.0.0.1:8000``.
        key: An administrator's key, or that of the tenant whose request is explained; None for a
            server without keys.
    """

    url: str
    key: str | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a route under ``/admin``, and return its JSON.

        Raises:
            AdministrationFailed: The server refused, or could not be reached.
        """
        return self.ask(method, f"admin/{path}", body)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call any route, and return its JSON.

        Raises:
            AdministrationFailed: The server refused, or could not be reached.
        """
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url.rstrip('/')}/{path}"
        try:
            asked = urllib.request.Request(url, data, headers, method=method)
            with urllib.request.urlopen(asked, timeout=_PATIENCE_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise AdministrationFailed(_reason(error)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AdministrationFailed(
                f"url={self.url!r}: no server answers ({reason}); give another --url, or "
                "start one with 'ostinato serve'"
            ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's message, with a hint for a missing key."""
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {error.code} {error.reason}"
    if error.code == 401:
        return f"{message}; give --key, or set OSTINATO_ADMIN_KEY"
    return message

"""How does a shell talk to a server's administration?

By the standard library alone: a handful of small JSON bodies needs no HTTP client.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from ostinato.core.errors import OstinatoError

_PATIENCE_S = 600
"""Prewarming a long prompt takes its time."""


class AdministrationFailed(OstinatoError):
    """The server refused, or could not be reached."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A server's administration.

    Attributes:
        url: Of the server, such as ``http://127.0.0.1:8000``.
        key: Of an administrator, or of whoever sent what is asked about; None where the server
            has no keys.
    """

    url: str
    key: str | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask for something, and return the answer.

        Raises:
            AdministrationFailed: The server refused, saying why, or could not be reached.
        """
        return self.ask(method, f"admin/{path}", body)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask for something that is not only for administrators, and return the answer.

        Raises:
            AdministrationFailed: The server refused, saying why, or could not be reached.
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
                f"url={self.url!r}: no server answers there ({reason}); give another --url, or "
                "start one with 'ostinato serve'"
            ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """Return what the server said, and what to do about a missing key."""
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {error.code} {error.reason}"
    if error.code == 401:
        return f"{message}; give --key, or set OSTINATO_ADMIN_KEY"
    return message

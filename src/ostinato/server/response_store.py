"""Stored responses, for ``previous_response_id``.

In memory, separate for each tenant, and bounded in number and bytes, per tenant and in total; the
oldest are evicted first. A client that needs a conversation for longer resends it in full.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from ostinato.server.tools import Message
from ostinato.tenants.terms import is_salt_of

MOST_PER_TENANT = 512
MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end.

    Attributes:
        salt: Salt under which it was cached: its tenant's, or a narrower one.
        body: The response's body.
        messages: The conversation without instructions, which apply to one response only.
        inputs: Its input items.
        num_bytes: Approximate size beyond that of the responses it continues.
    """

    salt: str
    body: dict[str, Any]
    messages: tuple[Message, ...]
    inputs: tuple[dict[str, Any], ...]
    num_bytes: int


class ResponseStore:
    """Stores responses by tenant and id."""

    def __init__(self, most_per_tenant: int = MOST_PER_TENANT, most_bytes: int = MOST_BYTES):
        """Start empty."""
        self._most_per_tenant = most_per_tenant
        self._most_bytes = most_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._counts: Counter[str] = Counter()  # by tenant
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of responses of all tenants."""
        return len(self._stored)

    def put(self, owner: str, response: StoredResponse) -> None:
        """Store a response under its tenant's salt; the oldest ones beyond a limit are evicted."""
        self._stored[owner, response.body["id"]] = response
        self._counts[owner] += 1
        self.num_bytes += response.num_bytes
        while self._counts[owner] > self._most_per_tenant:
            self._remove(next(key for key in self._stored if key[0] == owner))
        while self.num_bytes > self._most_bytes:
            self._remove(next(iter(self._stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response; None if it is unknown or evicted."""
        return self._stored.get((owner, response_id))

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; return False if there is none of that id."""
        if (owner, response_id) not in self._stored:
            return False
        self._remove((owner, response_id))
        return True

    def erase(self, salt: str) -> int:
        """Delete all responses of an erased salt; return their number."""
        keys = [key for key, stored in self._stored.items() if is_salt_of(stored.salt, salt)]
        for key in keys:
            self._remove(key)
        return len(keys)

    def _remove(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self._stored.pop(key).num_bytes
        self._counts[key[0]] -= 1
        if not self._counts[key[0]]:
            del self._counts[key[0]]

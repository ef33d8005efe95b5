"""Responses that can be continued.

In memory, apart for each tenant, and bounded: of a tenant and of all, in number and in bytes, the
oldest are evicted first. A client that needs a conversation for longer sends it in full.
"""

from collections import OrderedDict
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
        salt: Under which it was cached: that of its tenant, or a narrower one.
        body: As it was sent.
        messages: Without instructions, which hold for one response only.
        inputs: Items that it answered.
        num_bytes: What it adds to those that it continues, about.
    """

    salt: str
    body: dict[str, Any]
    messages: tuple[Message, ...]
    inputs: tuple[dict[str, Any], ...]
    num_bytes: int


class ResponseStore:
    """Remembers responses by tenant and id."""

    def __init__(self, most_per_tenant: int = MOST_PER_TENANT, most_bytes: int = MOST_BYTES):
        """Remember nothing yet."""
        self._most_per_tenant = most_per_tenant
        self._most_bytes = most_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._counts: dict[str, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of responses of all tenants."""
        return len(self._stored)

    def put(self, owner: str, response: StoredResponse) -> None:
        """Remember a response.

        Args:
            owner: Its tenant's salt.
            response: To be remembered.
        """
        num_bytes = response.num_bytes
        self._stored[owner, response.body["id"]] = response
        self._counts[owner] = self._counts.get(owner, 0) + 1
        self.num_bytes += num_bytes
        while self._counts.get(owner, 0) > self._most_per_tenant:
            self._drop(next(key for key in self._stored if key[0] == owner))
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response; None if there is none of that name, or no longer."""
        return self._stored.get((owner, response_id))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget one; returns False if there is none of that name."""
        if (owner, response_id) not in self._stored:
            return False
        self._drop((owner, response_id))
        return True

    def forget(self, salt: str) -> int:
        """Forget all of a salt that is erased, a tenant's or a narrower one; returns how many."""
        keys = [key for key, stored in self._stored.items() if is_salt_of(stored.salt, salt)]
        for key in keys:
            self._drop(key)
        return len(keys)

    def _drop(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self._stored.pop(key).num_bytes
        self._counts[key[0]] -= 1
        if not self._counts[key[0]]:
            del self._counts[key[0]]

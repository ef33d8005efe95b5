"""Stored responses, for ``previous_response_id``.

In memory, separate for each tenant, and bounded in number per tenant and in bytes of all; beyond
that, the tenant with the most bytes loses its oldest. So no tenant's share depends on what others
store, as long as it is not the largest. A client that needs a conversation for longer resends it in
full.

Responses are kept as JSON, in pieces: large fields of a body, such as a list of tools, messages and
input items. Equal pieces of one tenant are kept once::

    response ──► tools                  one list of tools
    response ──►   ┴  messages ...      the messages of the turns before
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ostinato.core.identity import is_salt_of
from ostinato.protocol.conversation import Message

MAX_PER_TENANT = 512
MAX_BYTES = 64 * 2**20

_MIN_FIELD_BYTES = 256
"""Fields of a body from this size on are pieces of their own."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to its end.

    Attributes:
        salt: Salt under which it was cached: its tenant's, or a narrower one.
        body: The response's body.
        messages: The conversation without instructions, which apply to one response only.
        inputs: Its input items.
    """

    salt: str
    body: Mapping[str, Any]
    messages: tuple[Message, ...]
    inputs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A response in pieces of JSON; ``small`` are the small fields of its body."""

    salt: str
    small: bytes
    fields: dict[str, bytes]
    messages: tuple[bytes, ...]
    inputs: tuple[bytes, ...]


@dataclass(slots=True)
class _Tenant:
    """The responses of one tenant, the oldest first, and how often they refer to each piece."""

    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    num_references: Counter[bytes] = field(default_factory=Counter)
    interned: dict[bytes, bytes] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, response: StoredResponse) -> None:
        small, large = dict[str, Any](), dict[str, bytes]()
        for name, value in response.body.items():
            content = _encoded(value)
            if len(content) < _MIN_FIELD_BYTES:
                small[name] = value
            else:
                large[name] = self._hold(content)
        entry = _Entry(
            response.salt,
            _encoded(small),
            large,
            tuple(self._hold(_encoded(message)) for message in response.messages),
            tuple(self._hold(_encoded(item)) for item in response.inputs),
        )
        self.num_bytes += len(entry.small)
        self.entries[response.body["id"]] = entry

    def read(self, response_id: str) -> StoredResponse:
        entry = self.entries[response_id]
        fields = {name: _decoded(content) for name, content in entry.fields.items()}
        return StoredResponse(
            entry.salt,
            {**_decoded(entry.small), **fields},
            tuple(map(_decoded, entry.messages)),
            tuple(map(_decoded, entry.inputs)),
        )

    def remove(self, response_id: str) -> None:
        entry = self.entries.pop(response_id)
        self.num_bytes -= len(entry.small)
        for content in (*entry.fields.values(), *entry.messages, *entry.inputs):
            self.num_references[content] -= 1
            if not self.num_references[content]:
                self.num_bytes -= len(content)
                del self.num_references[content], self.interned[content]

    def _hold(self, content: bytes) -> bytes:
        if content not in self.num_references:
            self.num_bytes += len(content)
        self.num_references[content] += 1
        return self.interned.setdefault(content, content)


class ResponseStore:
    """Stores responses by tenant and id."""

    def __init__(self, max_per_tenant: int = MAX_PER_TENANT, max_bytes: int = MAX_BYTES):
        """Start empty."""
        self._max_per_tenant = max_per_tenant
        self._max_bytes = max_bytes
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        """Number of responses of all tenants."""
        return sum(len(tenant.entries) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def put(self, owner: str, response: StoredResponse) -> None:
        """Store a response of a tenant; the oldest ones beyond a limit are evicted.

        Cost: linear in the response, and in the number of tenants.
        """
        tenant = self._tenants.setdefault(owner, _Tenant())
        tenant.add(response)
        if len(tenant.entries) > self._max_per_tenant:
            self._remove(owner, next(iter(tenant.entries)))
        while self.num_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._remove(largest, next(iter(self._tenants[largest].entries)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response; None if it is unknown or evicted."""
        tenant = self._tenants.get(owner)
        if tenant is None or response_id not in tenant.entries:
            return None
        return tenant.read(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; return False if there is none of that id."""
        tenant = self._tenants.get(owner)
        if tenant is None or response_id not in tenant.entries:
            return False
        self._remove(owner, response_id)
        return True

    def erase(self, salt: str) -> int:
        """Delete all responses of an erased salt; return their number."""
        keys = [
            (owner, response_id)
            for owner, tenant in self._tenants.items()
            for response_id, entry in tenant.entries.items()
            if is_salt_of(entry.salt, salt)
        ]
        for key in keys:
            self._remove(*key)
        return len(keys)

    def _remove(self, owner: str, response_id: str) -> None:
        tenant = self._tenants[owner]
        tenant.remove(response_id)
        if not tenant.entries:
            del self._tenants[owner]


def _encoded(value: Any) -> bytes:
    """Return JSON, in which a lone surrogate stays what it is."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _decoded(content: bytes) -> Any:
    return json.loads(content.decode(errors="surrogatepass"))

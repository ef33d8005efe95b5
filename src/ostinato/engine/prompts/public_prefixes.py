"""The public prefixes of an engine, by name.

An administrator publishes a prefix under a name; requests list the names that they may read. A
prompt uses a public prefix if it begins with all of its tokens and is longer; of several, the
longest. New weights and a reset remove all of them, and they have to be published again.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ostinato.core.errors import RequestError
from ostinato.core.identity import Identity
from ostinato.tenants.cache_admin import CacheAdmin

ALL_PUBLIC = "*"
"""As a name: every public prefix, whenever it was published."""


@dataclass(frozen=True, slots=True)
class PublishedPrefix:
    """One published prefix."""

    name: str
    tokens: "array[int]"  # its tokens, in whole blocks
    is_held: bool  # whether it is in the cache; if not, it has to be published again


def salt_of_public(name: str) -> bytes:
    """Return the salt of a public prefix; no tenant's salt, a text, is equal to it."""
    return b"\xff" + name.encode()


def public_name(salt: bytes) -> str | None:
    """Return the name of the public prefix of a salt; None if it is a tenant's."""
    return salt[1:].decode() if salt.startswith(b"\xff") else None


class PublicPrefixes:
    """All published prefixes of one engine; changed in the engine's thread, read in any.

    Attributes:
        by_name: The tokens of each.
    """

    def __init__(self, admin: CacheAdmin, block_size: int) -> None:
        self._admin = admin
        self._block_size = block_size
        self.by_name: dict[str, array[int]] = {}

    def whole_blocks(self, name: str, tokens: "array[int]") -> "array[int]":
        """Return the part of a prompt that can be published under a name.

        Raises:
            RequestError: The name is invalid or taken, or the prompt fills no block.
        """
        if not name or name == ALL_PUBLIC or "\x1f" in name:
            raise RequestError(f"name={name!r:.80}: a public prefix needs a name, other than '*'")
        if self._admin.is_public(salt_of_public(name)):
            raise RequestError(f"name={name!r:.80}: is public already; unpublish it first")
        size = self._block_size
        if len(tokens) < size:
            raise RequestError(
                f"a public prefix is shared in whole blocks of {size} tokens, and this one has "
                f"{len(tokens)}: publish a longer one"
            )
        return tokens[: len(tokens) // size * size]

    def add(self, name: str, tokens: "array[int]") -> None:
        """Add a prefix that is held now."""
        self.by_name[name] = tokens

    def remove(self, name: str) -> bool:
        """Remove a prefix; returns False if there is none of that name."""
        return self.by_name.pop(name, None) is not None

    def listed(self) -> list[PublishedPrefix]:
        """List all that were published and not unpublished, by name."""
        return [
            PublishedPrefix(name, tokens, self._admin.is_public(salt_of_public(name)))
            for name, tokens in sorted(self.by_name.items())
        ]

    def salts_of(self, names: Iterable[str]) -> list[bytes]:
        """Return the salts of the public prefixes of some names."""
        requested = set(names)
        known = self.by_name if ALL_PUBLIC in requested else requested & self.by_name.keys()
        return [salt_of_public(name) for name in list(known)]

    def identity_of(self, own: Identity, tokens: "array[int]", names: Iterable[str]) -> Identity:
        """Return the identity of a tenant's prompt.

        It continues the longest public prefix that the prompt begins with, of those it may read.

        Cost: O(names) comparisons of packed tokens.
        """
        requested = set(names)
        for name, prefix in sorted(self.by_name.items(), key=lambda item: -len(item[1])):
            may_read = name in requested or ALL_PUBLIC in requested
            if not may_read or len(prefix) >= len(tokens) or tokens[: len(prefix)] != prefix:
                continue
            salt = salt_of_public(name)
            if self._admin.is_public(salt):
                return replace(own, base=replace(own, tenant=salt), start=len(prefix))
        return own

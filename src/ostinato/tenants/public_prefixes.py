"""Public prefixes: which are published, and who may publish what continues them."""

from ostinato.core.identity import PrefixKey
from ostinato.tenants.terms import LeaseId


class PublicPrefixes:
    """The published prefixes of one cache, by the salt of each."""

    def __init__(self) -> None:
        """Start without a public prefix."""
        self._leases: dict[bytes, LeaseId] = {}

    def __contains__(self, salt: bytes) -> bool:
        """Whether the prefix of that salt is published."""
        return salt in self._leases

    def is_lease(self, lease_id: LeaseId) -> bool:
        """Whether a lease holds a public prefix."""
        return lease_id in self._leases.values()

    def add(self, salt: bytes, lease_id: LeaseId) -> None:
        """Note a prefix that a lease holds."""
        self._leases[salt] = lease_id

    def remove(self, salt: bytes) -> None:
        """Note that a prefix is published no more, if it was."""
        self._leases.pop(salt, None)

    def clear(self) -> None:
        """Note that none is published any more."""
        self._leases.clear()

    def may_continue(self, key: PrefixKey, num_hit: int) -> bool:
        """Whether a sequence may publish what it computes: its public prefix, if any, will stay.

        Args:
            key: The sequence.
            num_hit: Its first tokens that hit.
        """
        prefix = key.identity.public_prefix
        return prefix is None or (num_hit >= prefix.num_tokens and prefix.tenant in self)

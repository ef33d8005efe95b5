"""Encryption at rest: names and keys of tenants.

On a medium a tenant is a *name* of 16 bytes, a digest of its salt. With sealing each salt also has
a random key. A ``KeyStore`` keeps it wrapped in a key derived from a secret and the salt, which no
tier stores. Once the wrapped key is destroyed, the records cannot be read.

Without the secret a name reveals nothing; if there is none, a guessed salt can be checked.
"""

import hashlib
import hmac
import os
import threading

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ostinato.core.errors import ConfigError
from ostinato.tiers.encryption.tenant_keys import KeyStore, WrappedKey
from ostinato.tiers.port import Prefix
from ostinato.tiers.record import NAME_BYTES, NO_NAME, Names


class Sealing:
    """Names of salts, and the keys of tenants if records are sealed.

    Args:
        secret: 32 random bytes; without it, anyone can compute names.
        keys: Where keys are stored; None leaves records in the clear.
        remember: Whether keys are cached in memory: not where other engines may destroy them.
    """

    def __init__(
        self, secret: bytes = b"", keys: KeyStore | None = None, remember: bool = True
    ) -> None:
        if keys is not None and len(secret) < 16:
            raise ConfigError(
                f"a secret of {len(secret)} bytes: sealing needs 16 random bytes or more"
            )
        self._secret, self._store, self._remember = secret, keys, remember
        self._keys = dict[bytes, bytes]()
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether records are sealed."""
        return self._store is not None

    def name(self, salt: bytes) -> bytes:
        """Return the name of a salt on the medium."""
        return hmac.digest(b"ostinato name" + self._secret, salt, hashlib.sha256)[:NAME_BYTES]

    def names(self, prefix: Prefix) -> Names:
        """Return names of tenant, tenant without its client's salt, and public prefix."""
        tenant, owner, public = prefix.salts
        return self.name(tenant), self.name(owner), self.name(public) if public else NO_NAME

    def key(self, prefix: Prefix, create: bool) -> bytes | None:
        """Return the tenant's key; None without sealing, or if it has none and none is created.

        Raises:
            OSError: The key store failed.
        """
        if self._store is None:
            return None
        with self._lock:
            names = self.names(prefix)
            if (known := self._keys.get(names[0])) is not None:
                return known
            stored = self._store.find(names[0])
            if stored is None and create:
                stored = self._store.add(WrappedKey(names, self._wrap(prefix.tenant, names[0])))
            key = self._unwrap(prefix.tenant, stored) if stored is not None else None
            if key is not None and self._remember:
                self._keys[names[0]] = key
            return key

    def destroy(self, salt: bytes) -> int:
        """Destroy the keys of all that an erasure of a salt reaches; returns how many.

        Raises:
            OSError: The key store failed.
        """
        if self._store is None:
            return 0
        with self._lock:
            self._keys.clear()
            return self._store.destroy(self.name(salt))

    def _wrap(self, salt: bytes, name: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._wrapping(salt).encrypt(nonce, os.urandom(32), name)

    def _unwrap(self, salt: bytes, stored: WrappedKey) -> bytes | None:
        nonce, sealed = stored.wrapped[:12], stored.wrapped[12:]
        try:
            return self._wrapping(salt).decrypt(nonce, sealed, stored.names[0])
        except InvalidTag:
            return None

    def _wrapping(self, salt: bytes) -> AESGCM:
        derive = HKDF(algorithm=SHA256(), length=32, salt=self._secret, info=b"ostinato key")
        return AESGCM(derive.derive(b"salt:" + salt))

"""The keys file: API keys, quotas and limits of tenants.

A JSON file. It holds hashes of keys, never a key, so it is of no use to a thief::

    {
      "secret": "9f2c…",
      "tenants": {
        "ops":  {"keys": ["sha256:52aa…"], "administers": true},
        "acme": {"keys": ["sha256:77b0…"], "quota": 400, "guaranteed": 50,
                 "public": ["manual"]}
      }
    }

Keys are 256 random bits, so a plain SHA-256 is enough: there is nothing to guess, and nothing for
a slow hash to slow down. From the secret and a tenant's name comes the tenant's salt, which no
client ever sees or sends.
"""

import hashlib
import hmac
import os
import re
import secrets
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ostinato.core.errors import ConfigError
from ostinato.core.identity import SALT_SEPARATOR
from ostinato.settings import TenantShare

KEY_PREFIX = "sk-ostinato-"
"""Prefix of every key, so that a leaked one is recognized."""

_HASH = "sha256:"
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_BYTES = 32


class TenantEntry(BaseModel):
    """The entry of one tenant.

    Attributes:
        keys: Hashes of its keys; several, so that keys can be rotated.
        quota: Blocks that it may keep; beyond that it evicts its own first. None is no limit.
        guaranteed: Blocks that no other tenant can evict.
        priority: Priority of its requests; lower is scheduled first.
        max_requests: Maximum number of concurrent continuations.
        tokens_per_minute: Maximum number of prompt and generated tokens per minute.
        administers: Whether its keys may use ``/admin``.
        public: Names of the public prefixes that it may use; ``"*"`` is all.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    keys: list[str] = Field(default_factory=list)
    quota: int | None = Field(default=None, ge=1)
    guaranteed: int = Field(default=0, ge=0)
    priority: int = 0
    max_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    administers: bool = False
    public: list[str] = Field(default_factory=list)

    @field_validator("keys")
    @classmethod
    def _are_hashes(cls, keys: list[str]) -> list[str]:
        for key in keys:
            if not _HASHED.fullmatch(key):
                raise ValueError(
                    "a key is kept as 'sha256:' and 64 hexadecimal digits; 'ostinato keys new' "
                    "writes them"
                )
        return keys


class KeysFile(BaseModel):
    """The keys file.

    Attributes:
        secret: The server's secret; salts are derived from it, so a new one empties all caches.
        tenants: Entries by name.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    secret: str = Field(min_length=32)
    tenants: dict[str, TenantEntry] = Field(default_factory=dict)

    @field_validator("tenants")
    @classmethod
    def _have_names(cls, tenants: dict[str, TenantEntry]) -> dict[str, TenantEntry]:
        for name in tenants:
            check_tenant_name(name)
        owners: dict[str, str] = {}
        for name, entry in tenants.items():
            for key in entry.keys:
                if owners.setdefault(key, name) != name:
                    raise ValueError(f"tenants {owners[key]!r} and {name!r} have the same key")
        return tenants

    def salt_of(self, tenant: str) -> str:
        """Return a tenant's salt: 64 hexadecimal digits, derived from the secret."""
        return hmac.new(self.secret.encode(), tenant.encode(), hashlib.sha256).hexdigest()

    def owner_of(self, key: str) -> str | None:
        """Return the tenant of a key; None if it is unknown.

        Cost: one hash, and a constant-time comparison with every hash of the file.
        """
        presented, owner = hash_key(key), None
        for name, entry in self.tenants.items():
            for known in entry.keys:
                if hmac.compare_digest(known, presented):
                    owner = name
        return owner

    def tenant_shares(self) -> dict[str, TenantShare]:
        """Return guarantees and quotas by salt, of the tenants that have any.

        Raises:
            ConfigError: A guarantee is above its quota.
        """
        return {
            self.salt_of(name): TenantShare(entry.guaranteed, entry.quota)
            for name, entry in self.tenants.items()
            if entry.guaranteed or entry.quota is not None
        }


def check_tenant_name(name: str) -> None:
    """Check the name of a tenant.

    Raises:
        ValueError: It is empty or too long, or has unprintable characters.
    """
    if not name or len(name) > 200 or not name.isprintable() or SALT_SEPARATOR in name:
        raise ValueError(f"{name!r:.80}: a tenant's name has 1 to 200 printable characters")


def hash_key(key: str) -> str:
    """Return a key's hash, as in the file."""
    return _HASH + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> KeysFile:
    """Read a keys file.

    Raises:
        ConfigError: It cannot be read or is not a keys file; the message says where, without any
            hash or secret.
    """
    try:
        keys = KeysFile.model_validate_json(Path(path).read_text(encoding="utf-8"))
        keys.tenant_shares()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {str(path)!r} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"keys file {str(path)!r}: {place}: {first['msg']}") from error
    except ConfigError as error:
        raise ConfigError(f"keys file {str(path)!r}: {error}") from error
    return keys


def write_keys(path: str | Path, keys: KeysFile) -> None:
    """Write a keys file atomically, readable by its owner only.

    Raises:
        ConfigError: It cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(keys.model_dump_json(indent=2, exclude_defaults=True) + "\n")
        os.replace(name, target)
    except OSError as error:
        raise ConfigError(f"keys file {str(path)!r} cannot be written: {error}") from error


def add_key(path: str | Path, tenant: str, **changes: object) -> str:
    """Create a key, add its hash to the file, and return the key, which is stored nowhere.

    Args:
        path: A keys file; created if missing.
        tenant: The key's tenant.
        **changes: Settings of ``TenantEntry`` to change.

    Raises:
        ConfigError: The file cannot be read or written, or a setting is invalid.
    """
    keys = read_keys(path) if Path(path).exists() else KeysFile(secret=secrets.token_hex(32))
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    before = keys.tenants.get(tenant, TenantEntry()).model_dump()
    entry = {**before, **changes, "keys": [*before["keys"], hash_key(key)]}
    try:
        check_tenant_name(tenant)
        tenants = {**keys.model_dump()["tenants"], tenant: entry}
        whole = KeysFile.model_validate({"secret": keys.secret, "tenants": tenants})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc'][2:]))}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    whole.tenant_shares()
    write_keys(path, whole)
    return key

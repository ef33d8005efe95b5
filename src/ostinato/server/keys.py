"""API keys, and what each tenant gets.

A file of JSON. It holds hashes of keys, never a key, so it is of no use to a thief::

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
import json
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
"""What every key begins with, so that it is known for one where it should not be."""

_HASH = "sha256:"
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_BYTES = 32


class TenantEntry(BaseModel):
    """What the file says of one tenant.

    Attributes:
        keys: Hashes; a tenant may have several, to change them one by one.
        quota: Blocks that it may keep; above that it evicts its own first. None is no bound.
        guaranteed: Blocks that no other tenant can evict.
        priority: Of its requests; lower goes first.
        max_requests: Continuations that it may have under way at once.
        tokens_per_minute: Prompt and generated tokens that it may use.
        administers: Whether its keys open the administration.
        public: Names of public prefixes that it may begin with; ``"*"`` is all.
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
    """The whole file.

    Attributes:
        secret: Of the server; salts come from it, so changing it empties every tenant's cache.
        tenants: By name.
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
        """Return a tenant's salt: 64 hexadecimal digits that the secret alone can make."""
        return hmac.new(self.secret.encode(), tenant.encode(), hashlib.sha256).hexdigest()

    def owner_of(self, key: str) -> str | None:
        """Return the tenant of a key; None if it is unknown.

        Cost: one hash, and a comparison with every hash of the file that takes equally long
        whether it fits or not.
        """
        presented, owner = hash_key(key), None
        for name, entry in self.tenants.items():
            for known in entry.keys:
                if hmac.compare_digest(known, presented):
                    owner = name
        return owner

    def tenant_shares(self) -> dict[str, TenantShare]:
        """Return guarantees and quotas by salt, for those who have any.

        Raises:
            ConfigError: A guarantee is above its quota.
        """
        return {
            self.salt_of(name): TenantShare(entry.guaranteed, entry.quota)
            for name, entry in self.tenants.items()
            if entry.guaranteed or entry.quota is not None
        }


def check_tenant_name(name: str) -> None:
    """Refuse what cannot name a tenant.

    Raises:
        ValueError: It is empty, too long, or has characters that no log should show.
    """
    if not name or len(name) > 200 or not name.isprintable() or SALT_SEPARATOR in name:
        raise ValueError(f"{name!r:.80}: a tenant's name has 1 to 200 printable characters")


def hash_key(key: str) -> str:
    """Return what the file keeps of a key."""
    return _HASH + hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | Path) -> KeysFile:
    """Read a keys file.

    Raises:
        ConfigError: It cannot be read or is no keys file; the message says where, and shows no
            hash and no secret.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {str(path)!r} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"keys file {str(path)!r} is no JSON: {error}") from error
    try:
        keys = KeysFile.model_validate(content)
        keys.tenant_shares()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"keys file {str(path)!r}: {place}: {first['msg']}") from error
    except ConfigError as error:
        raise ConfigError(f"keys file {str(path)!r}: {error}") from error
    return keys


def write_keys(path: str | Path, keys: KeysFile) -> None:
    """Write a keys file that only its owner can read, all of it or nothing.

    Raises:
        ConfigError: It cannot be written.
    """
    target = Path(path)
    content = keys.model_dump(exclude_defaults=True)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:  # mkstemp lets the owner in alone
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        os.replace(name, target)
    except OSError as error:
        raise ConfigError(f"keys file {str(path)!r} cannot be written: {error}") from error


def add_key(path: str | Path, tenant: str, **changes: object) -> str:
    """Make a key, add its hash to a file, and return the key: it is not kept anywhere.

    Args:
        path: A keys file; it is made if there is none.
        tenant: Whose key.
        **changes: Settings of ``TenantEntry`` to be written with it; the others stay.

    Raises:
        ConfigError: The file or a setting cannot be.
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

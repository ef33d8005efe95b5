"""Authenticates callers, and holds their permissions.

By key, in ``Authorization: Bearer`` as OpenAI's clients send it or in ``x-api-key`` as Anthropic's
do. Without keys there is one anonymous caller, and the server listens on loopback only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from ostinato.core.errors import ConfigError
from ostinato.engine.prompts.public_prefixes import ALL_PUBLIC
from ostinato.server.access.keys import KeysFile, read_keys
from ostinato.server.errors import ApiError, unknown_name


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant.

    Attributes:
        max_requests: Concurrent continuations; None is no limit.
        tokens_per_minute: Prompt and generated tokens; None is no limit.
    """

    max_requests: int | None = None
    tokens_per_minute: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, identified by its key.

    Attributes:
        tenant: Its name, for statistics and logs; empty for the anonymous caller.
        salt: Separates its cache from those of other tenants.
        priority: Priority of its requests; lower is scheduled first.
        may_go_first: Whether a request may ask for less than ``priority``.
        may_administer: Whether it may use ``/admin``.
        limits: Its limits.
        public_prefixes: Names of the public prefixes that it may read.
    """

    tenant: str = ""
    salt: str = ""
    priority: int = 0
    may_go_first: bool = False
    may_administer: bool = False
    limits: Limits = NO_LIMITS
    public_prefixes: tuple[str, ...] = ()

    def check_priority(self, priority: int) -> None:
        """Check the priority that a request asks for, which is added to the caller's.

        Raises:
            ApiError: It is higher than the caller is entitled to (400).
        """
        if priority < 0 and not self.may_go_first:
            raise ApiError(
                400,
                f"priority={priority}: must be at least 0; only the administrator "
                "may raise priorities",
                param="priority",
                code="invalid_value",
            )


ANONYMOUS = Caller(may_go_first=True, may_administer=True, public_prefixes=(ALL_PUBLIC,))
"""The only caller of a server without keys; it may do everything."""


class AnyCaller:
    """Treats every client as the anonymous caller."""

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the anonymous caller; a key is ignored, since clients always send one."""
        return ANONYMOUS

    def named(self, tenant: str) -> Caller:
        """Return the anonymous caller, which has no name.

        Raises:
            ApiError: A name was given, and without keys there are no tenants (404).
        """
        if tenant:
            reason = (
                "without keys there are no tenants; leave it out, or give the cache_salt that its "
                "clients send"
            )
            raise unknown_name("tenant", tenant, reason, "tenant_not_found")
        return ANONYMOUS

    def name_of(self, salt: str) -> str:
        """Return no name: there are no tenants."""
        return ""


class KeyedCallers:
    """Authenticates callers by the keys file.

    Attributes:
        keys: The file as it was read last.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Raises:
            ConfigError: It cannot be read, or is not a keys file.
        """
        self._path = path
        self.keys = read_keys(path)
        self._names = _names(self.keys)

    def reload(self) -> None:
        """Reload the file; running requests keep their permissions.

        Raises:
            ConfigError: It cannot be read, or changes what needs a new engine: the secret, a
                guarantee or a quota. Then the old keys stay in force.
        """
        keys = read_keys(self._path)
        if keys.secret != self.keys.secret or keys.tenant_shares() != self.keys.tenant_shares():
            raise ConfigError(
                f"keys file {str(self._path)!r} changes the secret, a guarantee or a quota: blocks "
                "are shared out when the engine starts, so restart the server for that"
            )
        self.keys, self._names = keys, _names(keys)

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller of the key that was sent.

        Raises:
            ApiError: No key was sent, or an unknown one (401).
        """
        key = _key_in(headers)
        if not key:
            raise _unauthorized("no API key was sent: send 'Authorization: Bearer KEY'")
        tenant = self.keys.owner_of(key)
        if tenant is None:
            raise _unauthorized("the API key that was sent is not known to this server")
        return self.named(tenant)

    def named(self, tenant: str) -> Caller:
        """Return a tenant by its name.

        Raises:
            ApiError: The file has none of that name (404).
        """
        entry = self.keys.tenants.get(tenant)
        if entry is None:
            reason = "the keys file has no such tenant"
            raise unknown_name("tenant", tenant, reason, "tenant_not_found")
        return Caller(
            tenant=tenant,
            salt=self.keys.salt_of(tenant),
            priority=entry.priority,
            may_go_first=entry.administers,
            may_administer=entry.administers,
            limits=Limits(entry.max_requests, entry.tokens_per_minute),
            public_prefixes=tuple(entry.public),
        )

    def name_of(self, salt: str) -> str:
        """Return the tenant of a salt; salts are never shown."""
        return self._names.get(salt, "(not in the keys file)")


Callers = AnyCaller | KeyedCallers


async def require_caller(request: Request) -> Caller:
    """Return the caller, as the guard of bodies did; a dependency of every route except health.

    Raises:
        ApiError: No key, or an unknown one (401).
    """
    caller: Caller | None = getattr(request.state, "caller", None)
    callers: Callers = request.app.state.server.callers
    return caller or callers.identify(request.headers)


CallerDep = Annotated[Caller, Depends(require_caller)]
"""Write ``caller: CallerDep`` in the signature of a route."""


def require_administrator(caller: CallerDep) -> Caller:
    """Return the caller, if it may administer.

    Raises:
        ApiError: It may not (403).
    """
    if not caller.may_administer:
        raise ApiError(
            403,
            "this key does not administer: use one of a tenant whose entry says "
            '"administers": true',
            code="not_an_administrator",
        )
    return caller


ADMIN_ONLY = [Depends(require_administrator)]
"""Dependencies of the routes that only an administrator may call."""


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the key from either header; empty if none was sent."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _names(keys: KeysFile) -> dict[str, str]:
    return {keys.salt_of(name): name for name in keys.tenants}


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

"""``ostinato keys``: API keys of a server's tenants."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from ostinato.cli.options.option_groups import GroupedTyper, option
from ostinato.cli.output.tables import Field, Figure, figures, table_of
from ostinato.core.errors import ConfigError

_FILE = Annotated[str, typer.Option("--file", "-f", help="The keys file.")]

app = GroupedTyper(
    no_args_is_help=True, help="Create API keys for tenants of a server, and list the tenants."
)


@dataclass(frozen=True)
class TenantOptions:
    """Settings of a tenant, as the keys file names them."""

    quota: int | None = option(None)
    """Blocks that it may keep."""
    guaranteed: int | None = option(None)
    """Blocks that others cannot evict."""
    priority: int | None = option(None)
    """Lower goes first."""
    max_requests: int | None = option(None)
    """Maximum number of concurrent continuations."""
    tokens_per_minute: int | None = option(None)
    """Maximum prompt and generated tokens per minute."""
    public: list[str] | None = option(None)
    """Public prefix that it may use; may be repeated, '*' is all."""
    administers: bool | None = option(
        None, "Whether it may administer.", "--administers/--no-administers"
    )


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    file: _FILE = "keys.json",
    *,
    options: TenantOptions,
) -> None:
    """Create a key, print it once, and store its hash.

    A tenant may have several keys. Options change the tenant's settings; other settings are kept.
    """
    from ostinato.server.access.keys import add_key

    changes = {name: value for name, value in asdict(options).items() if value is not None}
    typer.echo(add_key(file, tenant, **changes))
    note = f"Its hash is in {file}. The key itself is not stored: copy it now."
    Console(stderr=True, soft_wrap=True).print(note, style="dim", highlight=False)


@app.command("list")
def list_tenants(file: _FILE = "keys.json") -> None:
    """List tenants with their limits and numbers of keys."""
    from ostinato.server.access.keys import read_keys

    tenants = [
        {"name": name, **entry.model_dump()} for name, entry in read_keys(file).tenants.items()
    ]
    Console().print(table_of(tenants, _TENANTS))


_TENANTS = (
    Field("Tenant", "name"),
    Figure("Keys", lambda tenant: len(tenant["keys"])),
    *figures(Quota="quota", Guaranteed="guaranteed", Priority="priority"),
    *figures(At_once="max_requests", Per_minute="tokens_per_minute"),
    Field("Public", "public", lambda names: " ".join(names) or "-"),
    Field("Administers", "administers"),
)


@contextmanager
def keys_file_of(path: str | None, api_key: str | None) -> Iterator[str | None]:
    """Yield a file of keys: the one given, or one of a single key for as long as it is served.

    Raises:
        ConfigError: Both are given, or the key is empty.
    """
    if api_key is None:
        yield path
        return
    if path is not None or not api_key:
        raise ConfigError(
            "--api-key: give one key that is not empty, or --keys-file with a file of them"
        )
    from ostinato.server.access.keys import KeysFile, TenantEntry, hash_key, write_keys

    entry = TenantEntry(keys=[hash_key(api_key)], administers=True)
    secret = hash_key(f"secret of {api_key}")  # the same after a restart: so are salts on disk
    with TemporaryDirectory(prefix="ostinato-keys-") as folder:
        file = f"{folder}/api-key"
        write_keys(file, KeysFile(secret=secret, tenants={"api-key": entry}))
        yield file


def note_on_callers(keys_file: str | None, api_key: str | None = None) -> str:
    """Return who may call a server with this file of keys, or with one key."""
    if api_key is not None:
        return "Callers need the key that --api-key gave."
    if keys_file is None:
        return "There are no keys: only this machine can reach it."
    return f"Callers need a key of {keys_file}."

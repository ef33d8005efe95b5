"""``ostinato cache``: administers the cache of a running server."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.cli import _cache_tables as tables
from ostinato.cli._admin_client import AdminClient
from ostinato.cli._option_groups import grouped, option
from ostinato.core.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option("--url", envvar="OSTINATO_URL", help="Of the server.")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="OSTINATO_ADMIN_KEY", help="Of an administrator."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the response as JSON.")]
PromptText = Annotated[str, typer.Argument(help="A text, or @FILE for the content of a file.")]
Tenant = Annotated[str, typer.Option(help="Tenant, on a server with keys.")]
Salt = Annotated[str, typer.Option(help="The cache_salt that its client sends.")]


@dataclass(frozen=True)
class Server:
    """The server, and the API key."""

    url: Url = URL
    key: Key = None

    @property
    def client(self) -> AdminClient:
        """The client."""
        return AdminClient(self.url, self.key)


app = typer.Typer(
    no_args_is_help=True,
    help="Inspect and administer a running server's cache.",
)
record = typer.Typer(no_args_is_help=True, help="Record a trace of the traffic, without content.")
app.add_typer(record, name="record")


@app.command("stats")
@grouped
def stats(server: Server, as_json: AsJson = False) -> None:
    """Show counters since the start."""
    _show(server.client.call("GET", "stats"), as_json, tables.draw_stats)


@app.command("audit")
@grouped
def audit(server: Server, as_json: AsJson = False) -> None:
    """Show the results of audits of hits."""
    _show(server.client.call("GET", "audit"), as_json, tables.draw_audit)


@app.command("tiers")
@grouped
def tiers(server: Server, as_json: AsJson = False) -> None:
    """Show the tiers: their contents, loads and stores."""
    _show(server.client.call("GET", "tiers"), as_json, tables.draw_tiers)


@app.command("heaviest")
@grouped
def heaviest(
    most: int = option(20, "Maximum number."),
    tenant: str | None = option(None, "Only this tenant's."),
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """List the prefixes that saved most tokens."""
    from urllib.parse import urlencode

    query = {"most": most} | ({} if tenant is None else {"tenant": tenant})
    answer = server.client.call("GET", f"heaviest?{urlencode(query)}")
    _show(answer, as_json, tables.draw_heaviest)


@app.command("prewarm")
@grouped
def prewarm(
    prompt: PromptText,
    tenant: Tenant = "",
    salt: Salt = "",
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Compute a prompt, so that the first request with it hits."""
    body = _prefix(prompt, tenant, salt)
    _show(server.client.call("POST", "prewarm", body), as_json, tables.draw_prewarmed)


@app.command("pin")
@grouped
def pin(
    prompt: PromptText,
    tenant: Tenant = "",
    salt: Salt = "",
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Keep the cached part of a prompt until it is released."""
    body = _prefix(prompt, tenant, salt)
    _show(server.client.call("POST", "leases", body), as_json, tables.draw_lease)


@app.command("lease")
@grouped
def lease(
    prompt: PromptText,
    ttl: str = option("5m", "Duration, such as 300, 5m or 24h."),
    refresh: bool = option(False, "Each hit restarts the time."),
    tenant: Tenant = "",
    salt: Salt = "",
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Keep the cached part of a prompt for some time."""
    terms = {"ttl_s": read_seconds("ttl", ttl), "refresh_on_hit": refresh}
    body = {**_prefix(prompt, tenant, salt), **terms}
    _show(server.client.call("POST", "leases", body), as_json, tables.draw_lease)


@app.command("leases")
@grouped
def leases(server: Server, as_json: AsJson = False) -> None:
    """List leases and their ends."""
    _show(server.client.call("GET", "leases"), as_json, tables.draw_leases)


@app.command("release")
@grouped
def release(
    lease_id: Annotated[int, typer.Argument(help="Number of the lease.")],
    *,
    server: Server,
) -> None:
    """Release a lease; its blocks may be evicted from now on."""
    server.client.call("DELETE", f"leases/{lease_id}")
    typer.echo(f"Lease {lease_id} is released.")


@app.command("publish")
@grouped
def publish(
    name: Annotated[str, typer.Argument(help="Name of the public prefix.")],
    prompt: PromptText,
    *,
    server: Server,
) -> None:
    """Compute a prefix once for all tenants that may use it."""
    from urllib.parse import quote

    path = f"public/{quote(name, safe='')}"
    answer = server.client.call("PUT", path, {"prompt": _read(prompt)})
    typer.echo(f"{answer['num_tokens']:,} tokens are public as {name!r}.")


@app.command("public")
@grouped
def public(server: Server, as_json: AsJson = False) -> None:
    """List public prefixes."""
    _show(server.client.call("GET", "public"), as_json, tables.draw_public)


@app.command("unpublish")
@grouped
def unpublish(
    name: Annotated[str, typer.Argument(help="Name of the public prefix.")],
    cancel: bool = option(False, "Cancel requests that begin with it."),
    *,
    server: Server,
) -> None:
    """Unpublish a public prefix, and evict what tenants computed after it."""
    from urllib.parse import quote

    path = f"public/{quote(name, safe='')}/unpublish"
    answer = server.client.call("POST", path, {"cancel_running": cancel})
    typer.echo(f"{name!r} is no longer public: {answer['num_blocks']:,} blocks evicted.")


@app.command("reset")
@grouped
def reset(
    preempt: bool = option(False, "Preempt running requests; they restart."),
    *,
    server: Server,
) -> None:
    """Evict all cached prefixes, of all tenants."""
    server.client.call("POST", "reset", {"preempt_running": preempt})
    typer.echo("The cache is empty.")


@app.command("erase")
@grouped
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant; '' on a server without keys.")],
    salt: str = option("", "Only requests with this salt."),
    cancel: bool = option(False, "Cancel its requests instead of waiting for them."),
    as_json: AsJson = False,
    *,
    server: Server,
) -> None:
    """Erase all data of a tenant, and print what was erased."""
    body = {"tenant": tenant, "cache_salt": salt, "cancel_running": cancel}
    _show(server.client.call("POST", "erase", body), as_json, tables.draw_receipt)


@record.command("start")
@grouped
def start_recording(
    name: Annotated[str, typer.Argument(help="File in the server's folder of traces.")],
    *,
    server: Server,
) -> None:
    """Record salted digests, lengths and times from now on."""
    answer = server.client.call("POST", "record/start", {"name": name})
    typer.echo(f"Recording to {answer['path']} on the server.")


@record.command("stop")
@grouped
def stop_recording(server: Server) -> None:
    """End the recording."""
    typer.echo(f"Recorded: {server.client.call('POST', 'record/stop')['path']}")


def read_seconds(name: str, text: str) -> float:
    """Read a duration such as ``300``, ``90s``, ``5m``, ``24h`` or ``2d``.

    Raises:
        ConfigError: It is not a duration above 0.
    """
    number, unit = text.strip(), "s"
    if number[-1:] in _UNITS_S:
        number, unit = number[:-1], number[-1]
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={text!r}: must be above 0, such as 300, 5m or 24h")
    return seconds


def _prefix(prompt: str, tenant: str, salt: str) -> dict[str, Any]:
    return {"prompt": _read(prompt), "tenant": tenant, "cache_salt": salt}


def _read(prompt: str) -> str:
    """Return a given prompt, or the content of the named file.

    Raises:
        ConfigError: The file cannot be read.
    """
    if not prompt.startswith("@"):
        return prompt
    try:
        return Path(prompt[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt={prompt!r}: cannot be read: {error}") from error


def _show(
    answer: dict[str, Any], as_json: bool, draw: Callable[[Console, dict[str, Any]], None]
) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        draw(Console(), answer)

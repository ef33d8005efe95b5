"""``ostinato cache``: administers the cache of a running server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.console import Console

from ostinato.cli._admin_client import AdminClient
from ostinato.cli.options.option_groups import GroupedTyper, option
from ostinato.cli.output import cache_tables as tables
from ostinato.cli.output.tables import print_json
from ostinato.core.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

URL = "http://127.0.0.1:8000"
AsJson = Annotated[bool, typer.Option("--json", help="Print the response as JSON.")]
PromptText = Annotated[str, typer.Argument(help="A text, or @FILE for the content of a file.")]
PublicName = Annotated[str, typer.Argument(help="Name of the public prefix.")]


@dataclass(frozen=True)
class Server:
    """The server, and the API key."""

    url: str = option(URL, envvar="OSTINATO_URL")
    """URL of the server."""
    key: str | None = option(None, envvar="OSTINATO_ADMIN_KEY")
    """API key of an administrator."""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a route under ``/admin``, and return its JSON."""
        return AdminClient(self.url, self.key).call(method, f"admin/{path}", body)


@dataclass(frozen=True)
class Report(Server):
    """The server, and how its response is printed."""

    as_json: AsJson = False

    def show(
        self, draw: tables.Draw, method: str, path: str, body: dict[str, Any] | None = None
    ) -> None:
        """Call a route under ``/admin``, and print its response as a table or as JSON."""
        answer = self.call(method, path, body)
        if self.as_json:
            print_json(answer, is_ascii=False)
        else:
            draw(Console(), answer)


@dataclass(frozen=True)
class PromptOwner:
    """The tenant and the salt that a prompt is cached for."""

    tenant: str = option("")
    """Tenant, on a server with keys."""
    salt: str = option("")
    """The cache_salt that its client sends."""

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        """Return the body of a request about a prompt."""
        return {"prompt": _read(prompt), "tenant": self.tenant, "cache_salt": self.salt, **more}


app = GroupedTyper(
    no_args_is_help=True,
    help="Inspect and administer a running server's cache.",
)
record = GroupedTyper(no_args_is_help=True, help="Record a trace of the traffic, without content.")
app.add_typer(record, name="record")


@app.command()
def stats(report: Report) -> None:
    """Show counters since the start."""
    report.show(tables.draw_stats, "GET", "stats")


@app.command()
def audit(report: Report) -> None:
    """Show the results of audits of hits."""
    report.show(tables.draw_audit, "GET", "audit")


@app.command()
def tiers(report: Report) -> None:
    """Show the tiers: their contents, loads and stores."""
    report.show(tables.draw_tiers, "GET", "tiers")


@app.command()
def heaviest(
    limit: int = option(20, "Maximum number.", "--most"),
    tenant: str | None = option(None, "Only this tenant's."),
    *,
    report: Report,
) -> None:
    """List the prefixes that saved most tokens."""
    query = {"most": limit} | ({} if tenant is None else {"tenant": tenant})
    report.show(tables.draw_heaviest, "GET", f"heaviest?{urlencode(query)}")


@app.command()
def prewarm(prompt: PromptText, owner: PromptOwner, report: Report) -> None:
    """Compute a prompt, so that the first request with it hits."""
    report.show(tables.draw_prewarmed, "POST", "prewarm", owner.body(prompt))


@app.command()
def pin(prompt: PromptText, owner: PromptOwner, report: Report) -> None:
    """Keep the cached part of a prompt until it is released."""
    report.show(tables.draw_lease, "POST", "leases", owner.body(prompt))


@app.command()
def lease(
    prompt: PromptText,
    ttl: str = option("5m", "Duration, such as 300, 5m or 24h."),
    refresh: bool = option(False, "Each hit restarts the time."),
    *,
    owner: PromptOwner,
    report: Report,
) -> None:
    """Keep the cached part of a prompt for some time."""
    ttl_s = read_seconds("ttl", ttl)
    body = owner.body(prompt, ttl_s=ttl_s, refresh_on_hit=refresh)
    report.show(tables.draw_lease, "POST", "leases", body)


@app.command()
def leases(report: Report) -> None:
    """List leases and their ends."""
    report.show(tables.draw_leases, "GET", "leases")


@app.command()
def release(
    lease_id: Annotated[int, typer.Argument(help="Number of the lease.")], server: Server
) -> None:
    """Release a lease; its blocks may be evicted from now on."""
    server.call("DELETE", f"leases/{lease_id}")
    typer.echo(f"Lease {lease_id} is released.")


@app.command()
def publish(name: PublicName, prompt: PromptText, server: Server) -> None:
    """Compute a prefix once for all tenants that may use it."""
    answer = server.call("PUT", f"public/{quote(name, safe='')}", {"prompt": _read(prompt)})
    typer.echo(f"{answer['num_tokens']:,} tokens are public as {name!r}.")


@app.command()
def public(report: Report) -> None:
    """List public prefixes."""
    report.show(tables.draw_public, "GET", "public")


@app.command()
def unpublish(
    name: PublicName,
    cancel: bool = option(False, "Cancel requests that begin with it."),
    *,
    server: Server,
) -> None:
    """Unpublish a public prefix, and evict what tenants computed after it."""
    path = f"public/{quote(name, safe='')}/unpublish"
    answer = server.call("POST", path, {"cancel_running": cancel})
    typer.echo(f"{name!r} is no longer public: {answer['num_blocks']:,} blocks evicted.")


@app.command()
def reset(
    server: Server, preempt: bool = option(False, "Preempt running requests; they restart.")
) -> None:
    """Evict all cached prefixes, of all tenants."""
    server.call("POST", "reset", {"preempt_running": preempt})
    typer.echo("The cache is empty.")


@app.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant; '' on a server without keys.")],
    salt: str = option("", "Only requests with this salt."),
    cancel: bool = option(False, "Cancel its requests instead of waiting for them."),
    *,
    report: Report,
) -> None:
    """Erase all data of a tenant, and print what was erased."""
    body = {"tenant": tenant, "cache_salt": salt, "cancel_running": cancel}
    report.show(tables.draw_receipt, "POST", "erase", body)


@record.command("start")
def start_recording(
    name: Annotated[str, typer.Argument(help="File in the server's folder of traces.")],
    server: Server,
) -> None:
    """Record salted digests, lengths and times from now on."""
    answer = server.call("POST", "record/start", {"name": name})
    typer.echo(f"Recording to {answer['path']} on the server.")


@record.command("stop")
def stop_recording(server: Server) -> None:
    """End the recording."""
    typer.echo(f"Recorded: {server.call('POST', 'record/stop')['path']}")


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

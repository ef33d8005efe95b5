"""``ostinato cache``: what is in a running server's cache, and what shall be in it?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ostinato.cli import _cache_tables as tables
from ostinato.cli._admin_client import AdminClient
from ostinato.core.errors import ConfigError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Url = Annotated[str, typer.Option("--url", envvar="OSTINATO_URL", help="Of the server.")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="OSTINATO_ADMIN_KEY", help="Of an administrator."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
PromptText = Annotated[str, typer.Argument(help="A text, or @FILE for what is in a file.")]
Tenant = Annotated[str, typer.Option(help="Whose, where the server has keys.")]
Salt = Annotated[str, typer.Option(help="The cache_salt that its client sends.")]
URL = "http://127.0.0.1:8000"

app = typer.Typer(
    no_args_is_help=True,
    help="Look into a running server's cache, and say what shall stay in it.",
)
record = typer.Typer(no_args_is_help=True, help="Record a trace of the traffic, without content.")
app.add_typer(record, name="record")


@app.command("stats")
def stats(url: Url = URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show counters since the start."""
    _show(AdminClient(url, key).call("GET", "stats"), as_json, tables.draw_stats)


@app.command("heaviest")
def heaviest(
    most: Annotated[int, typer.Option(help="How many at most.")] = 20,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant alone.")] = None,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List the prefixes that saved most tokens."""
    from urllib.parse import urlencode

    query = {"most": most} | ({} if tenant is None else {"tenant": tenant})
    answer = AdminClient(url, key).call("GET", f"heaviest?{urlencode(query)}")
    _show(answer, as_json, tables.draw_heaviest)


@app.command("prewarm")
def prewarm(
    prompt: PromptText,
    tenant: Tenant = "",
    salt: Salt = "",
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Compute a prompt, so that the first who sends it finds it."""
    body = _prefix(prompt, tenant, salt)
    _show(AdminClient(url, key).call("POST", "prewarm", body), as_json, tables.draw_prewarmed)


@app.command("pin")
def pin(
    prompt: PromptText,
    tenant: Tenant = "",
    salt: Salt = "",
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Keep what is cached of a prompt until it is released."""
    body = _prefix(prompt, tenant, salt)
    _show(AdminClient(url, key).call("POST", "leases", body), as_json, tables.draw_lease)


@app.command("lease")
def lease(
    prompt: PromptText,
    ttl: Annotated[str, typer.Option(help="For how long, such as 300, 5m or 24h.")] = "5m",
    refresh: Annotated[bool, typer.Option(help="Each use starts the time anew.")] = False,
    tenant: Tenant = "",
    salt: Salt = "",
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Keep what is cached of a prompt for a time."""
    terms = {"ttl_s": read_seconds("ttl", ttl), "refresh_on_hit": refresh}
    body = {**_prefix(prompt, tenant, salt), **terms}
    _show(AdminClient(url, key).call("POST", "leases", body), as_json, tables.draw_lease)


@app.command("leases")
def leases(url: Url = URL, key: Key = None, as_json: AsJson = False) -> None:
    """List what is kept, and until when."""
    _show(AdminClient(url, key).call("GET", "leases"), as_json, tables.draw_leases)


@app.command("release")
def release(
    lease_id: Annotated[int, typer.Argument(help="Number of the lease.")],
    url: Url = URL,
    key: Key = None,
) -> None:
    """Let go of a lease; what it kept may be evicted from now on."""
    AdminClient(url, key).call("DELETE", f"leases/{lease_id}")
    typer.echo(f"Lease {lease_id} is released.")


@app.command("publish")
def publish(
    name: Annotated[str, typer.Argument(help="Name of the public prefix.")],
    prompt: PromptText,
    url: Url = URL,
    key: Key = None,
) -> None:
    """Compute a prefix once, for all tenants that may begin with it."""
    from urllib.parse import quote

    path = f"public/{quote(name, safe='')}"
    answer = AdminClient(url, key).call("PUT", path, {"prompt": _read(prompt)})
    typer.echo(f"{answer['num_tokens']:,} tokens are public as {name!r}.")


@app.command("public")
def public(url: Url = URL, key: Key = None, as_json: AsJson = False) -> None:
    """List what is public."""
    _show(AdminClient(url, key).call("GET", "public"), as_json, tables.draw_public)


@app.command("unpublish")
def unpublish(
    name: Annotated[str, typer.Argument(help="Name of the public prefix.")],
    cancel: Annotated[bool, typer.Option(help="Cancel requests that begin with it.")] = False,
    url: Url = URL,
    key: Key = None,
) -> None:
    """Forget a public prefix, and what all tenants computed behind it."""
    from urllib.parse import quote

    path = f"public/{quote(name, safe='')}/unpublish"
    answer = AdminClient(url, key).call("POST", path, {"cancel_running": cancel})
    typer.echo(f"{name!r} is public no more: {answer['num_blocks']:,} blocks are forgotten.")


@app.command("reset")
def reset(
    preempt: Annotated[
        bool, typer.Option(help="Running requests give their blocks back and start again.")
    ] = False,
    url: Url = URL,
    key: Key = None,
) -> None:
    """Forget everything that is cached, of everybody."""
    AdminClient(url, key).call("POST", "reset", {"preempt_running": preempt})
    typer.echo("Nothing is cached any more.")


@app.command("erase")
def erase(
    tenant: Annotated[str, typer.Argument(help="Whose; '' where the server has no keys.")],
    salt: Annotated[str, typer.Option(help="Only what its client narrowed by this salt.")] = "",
    cancel: Annotated[bool, typer.Option(help="Cancel its requests; else wait for them.")] = False,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Leave nothing of a tenant, and say what was erased."""
    body = {"tenant": tenant, "cache_salt": salt, "cancel_running": cancel}
    _show(AdminClient(url, key).call("POST", "erase", body), as_json, tables.draw_receipt)


@record.command("start")
def start_recording(
    name: Annotated[str, typer.Argument(help="File in the server's folder of traces.")],
    url: Url = URL,
    key: Key = None,
) -> None:
    """Record salted digests, lengths and times from now on."""
    answer = AdminClient(url, key).call("POST", "record/start", {"name": name})
    typer.echo(f"Recording to {answer['path']} on the server.")


@record.command("stop")
def stop_recording(url: Url = URL, key: Key = None) -> None:
    """End the recording."""
    typer.echo(f"Recorded: {AdminClient(url, key).call('POST', 'record/stop')['path']}")


def read_seconds(name: str, text: str) -> float:
    """Read a duration such as ``300``, ``90s``, ``5m``, ``24h`` or ``2d``.

    Raises:
        ConfigError: It is none above 0.
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
    """Return a prompt that was given, or what is in the file that was named.

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

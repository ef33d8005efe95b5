"""``ostinato route``: one address for many engines, with prefix-aware routing."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli._admin_client import AdminClient, NoServer
from ostinato.cli.cache import AsJson
from ostinato.cli.keys import note_on_callers
from ostinato.cli.options.option_groups import GroupedTyper, grouped, option
from ostinato.cli.options.setting_options import SettingOptions
from ostinato.cli.output.tables import Field, figures, print_json, table_of
from ostinato.core.errors import ConfigError
from ostinato.router.process.config import GROUPS, FleetConfig

_POLL_S = 0.2
"""Seconds between two looks at workers that do not answer yet."""

app = GroupedTyper(help="Route requests to many engines, each to where its prefix is cached.")


@dataclass(frozen=True)
class RouterAddress:
    """A running router, and the API key."""

    url: str = option("http://127.0.0.1:8080", envvar="OSTINATO_ROUTER_URL")
    """URL of the router."""
    key: str | None = option(None, envvar="OSTINATO_ADMIN_KEY")
    """API key of an administrator."""

    @property
    def client(self) -> AdminClient:
        """The client."""
        return AdminClient(self.url, self.key, "ostinato route")


def run(
    context: typer.Context,
    *,
    settings: Annotated[dict[str, Any], SettingOptions(FleetConfig, GROUPS)],
) -> None:
    """Route requests to workers until SIGTERM or Ctrl-C.

    Try: ostinato route --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002
    """
    if context.invoked_subcommand is not None:
        return
    from ostinato.router.process.lifecycle import run_router

    config = FleetConfig(**settings)
    run_router(config, lambda address: _announce(address, config))


app.callback(invoke_without_command=True)(grouped(run))


@app.command()
def status(
    as_json: AsJson = False,
    wait: float = option(0.0, "Seconds to wait for the router, and for all workers to answer."),
    *,
    router: RouterAddress,
) -> None:
    """Show the workers of a running router: load, hits, and how their caches are known."""
    answer = _workers(router.client, time.monotonic() + wait)
    if as_json:
        print_json(answer)
        return
    table = table_of(answer["workers"], _WORKERS)
    console = Console(highlight=False)
    console.print(f"Workers, policy {answer['policy']}:", table, sep="\n")
    if (both := answer.get("plugged")) is not None:
        console.print(
            f"Of the prompt tokens of {both['requests']:,} requests {both['own_ratio']:.1%} were "
            f"expected to hit; cache_state, asked beside it, would have had "
            f"{both['built_in_ratio']:.1%}."
        )


def _cache_known(row: dict[str, Any]) -> str:
    """Describe how a worker's cache is known, and since when not."""
    heard = row["state"] if row["is_well"] else f"{row['state']} when last heard"
    return f"{heard}: {row['reason']}" if row["reason"] else heard


_WORKERS = (
    Field("worker", "name", is_whole=True),
    Field("health", lambda row: "draining" if row["is_draining"] else row["trouble"] or "well"),
    Field("cache known", _cache_known),
    *figures(running="num_requests", cached="cached_tokens"),
    *figures(hits="hit_tokens", computed="computed_tokens"),
)


def _workers(client: AdminClient, deadline_s: float) -> dict[str, Any]:
    """Return the state of the workers, when all of them answer or time is up.

    Raises:
        AdministrationFailed: No router has answered by then, or it refuses.
    """
    while True:
        is_late = time.monotonic() >= deadline_s
        try:
            answer = client.call("GET", "admin/workers")
            if is_late or all(row["is_well"] for row in answer["workers"]):
                return answer
        except NoServer:
            if is_late:
                raise
        time.sleep(_POLL_S)


@app.command()
def explain(
    what: Annotated[
        str,
        typer.Argument(help="A decision's number, a prompt, or @FILE with a request's body."),
    ],
    model: str = option("", "Model that a prompt is for."),
    as_json: AsJson = False,
    *,
    router: RouterAddress,
) -> None:
    """Explain where a running router sent a request, or would send it, and why."""
    if what.isdigit():
        answer = router.client.call("GET", f"route/{what}")
    else:
        answer = router.client.call("POST", "route?dry_run=1", _body_of(what, model))
    if as_json:
        print_json(answer)
        return
    typer.echo(answer["explanation"])


def _body_of(what: str, model: str) -> dict[str, Any]:
    """Return the body of a request to explain.

    Raises:
        ConfigError: The file cannot be read, or has no JSON object.
    """
    if not what.startswith("@"):
        return {"prompt": what, "model": model} if model else {"prompt": what}
    try:
        body = json.loads(Path(what[1:]).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what!r}: cannot be read as a request's body: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{what!r}: holds no JSON object")
    return body


def _announce(address: str, config: FleetConfig) -> None:
    """Print the router's address and its workers."""
    console = Console(stderr=True, soft_wrap=True)
    workers = len(config.workers)
    line = Text(f"Routing to {workers} worker{'' if workers == 1 else 's'} by ")
    line.append(config.policy, style="bold").append(" on ").append(f"{address}/v1", style="bold")
    console.print(line)
    console.print(note_on_callers(config.keys_file), style="dim")

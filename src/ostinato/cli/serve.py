"""How is a model served over HTTP?"""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli import _engine_options as options
from ostinato.cli._option_groups import grouped
from ostinato.engine.config import DEFAULT_MODEL
from ostinato.lab.quantities import read_bytes

_SERVER = "Server"


@grouped
def run(
    model: Annotated[
        str,
        typer.Argument(help="A model's name, a directory, a GGUF file, or a name on the hub."),
    ] = DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Where to listen.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Where to listen; 0 takes any free port.", rich_help_panel=_SERVER)
    ] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be repeated. Else as it is loaded.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_requests: Annotated[
        int,
        typer.Option(
            help="Continuations at once, running and waiting; more are answered with 429.",
            rich_help_panel=_SERVER,
        ),
    ] = 1024,
    max_n: Annotated[
        int, typer.Option(help="Most continuations of one prompt.", rich_help_panel=_SERVER)
    ] = 128,
    max_body: Annotated[
        str, typer.Option(help="Longest body of a request.", rich_help_panel=_SERVER)
    ] = "8MiB",
    max_tenant_bodies: Annotated[
        str,
        typer.Option(
            help="Bodies of one tenant's requests under way, together.", rich_help_panel=_SERVER
        ),
    ] = "64MiB",
    max_json_items: Annotated[
        int | None,
        typer.Option(
            help="Most values in a body; else 8 per token of the model.", rich_help_panel=_SERVER
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(help="Most open connections.", rich_help_panel=_SERVER)
    ] = 8192,
    max_per_address: Annotated[
        int, typer.Option(help="Most open connections of one address.", rich_help_panel=_SERVER)
    ] = 2048,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds for the head of a request.", rich_help_panel=_SERVER)
    ] = 10.0,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds for the body of a request.", rich_help_panel=_SERVER)
    ] = 60.0,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call from browsers; may be repeated, '*' is all.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="File of a private key, for TLS.", rich_help_panel=_SERVER)
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(help="File of its certificates.", rich_help_panel=_SERVER)
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Format of calls: hermes, llama3_json, mistral, deepseek_v3 or openai; else as "
            "the chat template shows.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of reasoning, which then has a field of its own: qwen3, deepseek_r1, "
            "mistral, granite or openai_gptoss.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    metrics_tenant_names: Annotated[
        bool,
        typer.Option(
            "--metrics-tenant-names",
            help="Metrics and spans may name tenants; else metrics number them.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    otel_traces: Annotated[
        bool,
        typer.Option(
            "--otel-traces",
            help="Send a span per request to OpenTelemetry; needs ostinato[otel].",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests may go on after SIGTERM.", rich_help_panel=_SERVER
        ),
    ] = 30.0,
    keys: Annotated[
        str | None,
        typer.Option(
            help="File of keys, see 'ostinato keys'; without it only this machine is let in.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    prewarm: Annotated[
        str | None,
        typer.Option(
            help="File of prompts to compute before the first request, one JSON object a line.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(
            help="Folder for traces that 'ostinato cache record' starts.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    *,
    engine: options.ServedEngineOptions,
) -> None:
    """Serve a model over HTTP, to clients of OpenAI's API.

    Without keys it listens on this machine alone. SIGTERM or Ctrl-C lets running requests end;
    the second one ends them.

    Try: ostinato serve tiny-shakespeare
    """
    from ostinato.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        model_names=tuple(name or (model,)),
        max_requests=max_requests,
        max_n=max_n,
        max_body_bytes=read_bytes("max_body", max_body),
        max_tenant_body_bytes=read_bytes("max_tenant_bodies", max_tenant_bodies),
        max_json_items=max_json_items,
        max_connections=max_connections,
        max_connections_per_address=max_per_address,
        allowed_origins=tuple(allowed_origin or ()),
        tls_key_file=tls_key,
        tls_certificate_file=tls_certificate,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        drain_timeout_s=drain_timeout,
        metrics_tenant_names=metrics_tenant_names,
        otel_traces=otel_traces,
        keys_file=keys,
        traces_folder=traces,
    )
    settings = engine.settings(model)
    from ostinato.server.admin.prewarming import read_prewarm_file
    from ostinato.server.lifecycle import listen, open_state, run_server, warm_up

    prompts = [] if prewarm is None else read_prewarm_file(prewarm)
    with listen(config) as listener:
        with Console(stderr=True).status(f"Loading {model} ..."):
            state = open_state(model, settings, config)
            warm_up(state, prompts)
        path = str(state.llm.engine.compute_path)
        run_server(state, listener, lambda address: _announce(model, address, keys, path))


def _announce(model: str, address: str, keys_file: str | None, compute_path: str) -> None:
    """Say where the model is served, to whom, and how it is computed."""
    console = Console(stderr=True, soft_wrap=True)
    line = Text("Serving ").append(model, style="bold").append(" on ")
    console.print(line.append(f"{address}/v1", style="bold"))
    console.print(f"Computing in {compute_path}.", style="dim", markup=False, highlight=False)
    if keys_file is not None:
        console.print(f"Callers need a key of {keys_file}.", style="dim")
    else:
        console.print("There are no keys: only this machine can reach it.", style="dim")

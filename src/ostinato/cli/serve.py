"""``ostinato serve``: serves a model over HTTP."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import ostinato
from ostinato.cli.keys import keys_file_of, note_on_callers
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.lab.size.quantities import read_bytes
from ostinato.plugins.explainer import check_explainer

_server = partial(option, panel="Server")


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the server."""

    host: str = _server("127.0.0.1", "Where to listen.")
    port: int = _server(8000, "Port to listen on; 0 takes any free one.")
    name: list[str] | None = _server(
        None,
        "Name of the model for clients; may be repeated; by default the model argument.",
        "--name",
        "--served-model-name",
    )
    max_requests: int = _server(
        1024, "Maximum continuations, running and waiting; beyond that, 429."
    )
    key_share: float = _server(
        0.5, "Share of --max-requests that one key may have while no other has any."
    )
    max_n: int = _server(128, "Maximum continuations of one prompt.")
    max_body: str = _server("8MiB", "Maximum length of a request's body.")
    max_tenant_bodies: str = _server(
        "64MiB", "Maximum total bodies of one tenant's unfinished requests."
    )
    max_json_items: int | None = _server(
        None, "Maximum JSON values in a body; by default 8 per token of the model."
    )
    max_json_objects: int = _server(16384, "Maximum JSON objects in a body.")
    max_connections: int = _server(8192, "Most open connections.")
    max_per_address: int = _server(2048, "Maximum connections of one address.")
    header_timeout: float = _server(10.0, "Time limit for a request's head, in seconds.")
    body_timeout: float = _server(60.0, "Time limit for a request's body, in seconds.")
    min_body_rate: str = _server(
        "1KiB", "Bytes per second that a body must bring, after --header-timeout."
    )
    send_timeout: float = _server(
        30.0, "Seconds in which a client must take 16 KiB of its response, or all that waits."
    )
    max_unread: str = _server(
        "16MiB", "Computed output that a client may leave unread before it is disconnected."
    )
    max_tenant_unread: str = _server("128MiB", "Maximum total unread output of one tenant.")
    allowed_origin: list[str] | None = _server(
        None, "Origin of web pages that may send requests (CORS); may be repeated, '*' is all."
    )
    tls_key: str | None = _server(None, "File of a private key, for TLS.")
    tls_certificate: str | None = _server(None, "File of its certificate chain.")
    tool_call_parser: str = _server(
        "auto",
        "Format of tool calls: hermes, llama3_json, mistral, deepseek_v3 or openai; by default "
        "from the chat template.",
    )
    reasoning_parser: str | None = _server(
        None,
        "Format of reasoning, which then has a field of its own: qwen3, deepseek_r1, mistral, "
        "granite or openai_gptoss.",
    )
    metrics_tenant_names: bool = _server(
        False,
        "Name tenants in metrics and spans; by default metrics number them.",
        "--metrics-tenant-names",
    )
    strict_fields: bool = _server(
        False,
        "Refuse requests with fields that this server does not know; by default a header of the "
        "response names them.",
        "--strict-fields",
    )
    keep_checksums: bool = _server(
        False,
        "Keep the checksum in the first line of Claude Code's system text, which makes every "
        "conversation miss; by default it is set aside.",
        "--keep-checksums",
    )
    otel_traces: bool = _server(
        False,
        "Send a span per request to OpenTelemetry; needs ostinato[otel].",
        "--otel-traces",
    )
    explainer: str | None = _server(
        None, "Function that explains misses beside the engine, as FILE.py:function."
    )
    drain_timeout: float = _server(
        30.0, "Seconds that running requests may continue after SIGTERM."
    )
    keys: str | None = _server(
        None, "File of keys, see 'ostinato keys'; without it only this machine can call."
    )
    api_key: str | None = _server(
        None,
        "One key that every caller sends, in place of --keys.",
        envvar="OSTINATO_API_KEY",
    )
    gpu_memory_utilization: float | None = _server(
        None, "As in vLLM: nothing on a CPU; on a GPU give --kv-cache-memory."
    )
    prewarm: str | None = _server(
        None, "File of prompts to compute before the first request, one JSON object per line."
    )
    lora_modules: list[str] | None = _server(
        None, "Serve a LoRA adapter under its own model name: NAME=DIRECTORY; may be repeated."
    )
    lora_folder: list[str] | None = _server(
        None, "Folder that adapters may be loaded from over HTTP; may be repeated."
    )
    traces: str | None = _server(None, "Folder for traces that 'ostinato cache record' starts.")


def run(
    model: Annotated[
        str,
        typer.Argument(help="A model's name, a directory, a GGUF file, or a name on the hub."),
    ] = DEFAULT_MODEL,
    *,
    server: ServerOptions,
    engine: options.ServedEngineOptions,
) -> None:
    """Serve a model over HTTP, to clients of OpenAI's API.

    Without keys it only serves this machine. SIGTERM or Ctrl-C lets running requests finish; a
    second one stops them.

    Try: ostinato serve tiny-shakespeare
    """
    ostinato.announce_compilation(sys.stderr)
    with keys_file_of(server.keys, server.api_key) as keys_file:
        _serve(model, server, engine, keys_file)


def _serve(
    model: str,
    server: ServerOptions,
    engine: options.ServedEngineOptions,
    keys_file: str | None,
) -> None:
    """Serve a model until a signal."""
    from ostinato.server.config import ServerConfig

    config = ServerConfig(
        host=server.host,
        port=server.port,
        model_names=tuple(server.name or (model,)),
        max_requests=server.max_requests,
        key_share=server.key_share,
        max_n=server.max_n,
        max_body_bytes=read_bytes("max_body", server.max_body),
        max_tenant_body_bytes=read_bytes("max_tenant_bodies", server.max_tenant_bodies),
        max_json_items=server.max_json_items,
        max_json_objects=server.max_json_objects,
        max_connections=server.max_connections,
        max_connections_per_address=server.max_per_address,
        allowed_origins=tuple(server.allowed_origin or ()),
        tls_key_file=server.tls_key,
        tls_certificate_file=server.tls_certificate,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        header_timeout_s=server.header_timeout,
        body_timeout_s=server.body_timeout,
        min_body_rate=read_bytes("min_body_rate", server.min_body_rate),
        send_timeout_s=server.send_timeout,
        max_unread_bytes=read_bytes("max_unread", server.max_unread),
        max_tenant_unread_bytes=read_bytes("max_tenant_unread", server.max_tenant_unread),
        drain_timeout_s=server.drain_timeout,
        metrics_tenant_names=server.metrics_tenant_names,
        strict_fields=server.strict_fields,
        keep_checksums=server.keep_checksums,
        otel_traces=server.otel_traces,
        explainer=server.explainer,
        keys_file=keys_file,
        traces_folder=server.traces,
        lora_folders=tuple(server.lora_folder or ()),
    )
    adapters = options.named_paths("--lora-modules", server.lora_modules or [])
    settings = engine.settings(model, gpu_memory_utilization=server.gpu_memory_utilization)
    settings["enable_lora"] |= bool(adapters)
    if keys_file is not None and settings["kv_sealed"] is None:
        settings["kv_sealed"] = True
    if server.explainer is not None:
        check_explainer(server.explainer)
    from ostinato.server.admin.prewarming import read_prewarm_file
    from ostinato.server.lifecycle import (
        listen,
        load_adapters,
        open_state,
        run_server,
        warm_up,
    )

    prompts = [] if server.prewarm is None else read_prewarm_file(server.prewarm)
    with listen(config) as listener:
        with Console(stderr=True).status(f"Loading {model} ..."):
            state = open_state(model, settings, config)
            load_adapters(state, adapters)
            warm_up(state, prompts)
        path = str(state.llm.engine.compute_path)
        callers = note_on_callers(server.keys, server.api_key)
        run_server(state, listener, lambda address: _announce(model, address, callers, path))


def _announce(model: str, address: str, callers: str, compute_path: str) -> None:
    """Print the address, the compute path, and who may call."""
    console = Console(stderr=True, soft_wrap=True)
    line = Text("Serving ").append(model, style="bold").append(" on ")
    console.print(line.append(f"{address}/v1", style="bold"))
    console.print(f"Computing in {compute_path}.", style="dim", markup=False, highlight=False)
    console.print(callers, style="dim")

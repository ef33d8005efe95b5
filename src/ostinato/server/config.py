"""Settings of a server, and those that a router shares with it."""

from dataclasses import dataclass
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, same_setting, setting
from ostinato.server.answers.answer_formats import REASONING_FORMATS, TOOL_FORMATS

SERVER, LIMITS, CONNECTIONS = "Server", "Limits", "Connections"
"""Groups of settings."""

_server = partial(setting, group=SERVER)
_limits = partial(setting, group=LIMITS)
_connections = partial(setting, group=CONNECTIONS)
_answers = partial(setting, group="Answers")
_observing = partial(setting, group="Observing")


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address; of names, only ``localhost`` is trusted."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=64)  # a client sends the same address with each request
def is_loopback_address(address: str) -> bool:
    """Return whether a URL, or ``//host:port``, has a loopback host."""
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:  # not an address
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """Settings of a process that listens for HTTP requests."""

    host: str = _server("127.0.0.1")
    """Address to listen on."""
    port: int = _server(8000, minimum=0, maximum=65535)
    """Port to listen on; 0 takes any free one."""
    keys_file: str | None = _server(None, page="security.md", old_options=("--keys",))
    """File of API keys, see ``ostinato keys``; without it only this machine can call."""
    max_requests: int = _limits(1024, minimum=1)
    """Maximum concurrent requests; beyond that, 429."""
    max_body_bytes: int = _limits(8 * 2**20, minimum=1, old_options=("--max-body",))
    """Maximum length of a request's body."""
    max_tenant_body_bytes: int = _limits(
        64 * 2**20, minimum=1, old_options=("--max-tenant-bodies",)
    )
    """Maximum total bodies of one tenant's unfinished requests."""
    max_connections: int = _connections(8192, minimum=1)
    """Maximum open connections; fewer if the process may open fewer files."""
    max_connections_per_address: int = _connections(
        2048, minimum=1, old_options=("--max-per-address",)
    )
    """Maximum open connections of one address."""
    header_timeout_s: float = _connections(10.0, above=0, old_options=("--header-timeout",))
    """Seconds in which a request's head must arrive."""
    body_timeout_s: float = _connections(60.0, above=0, old_options=("--body-timeout",))
    """Seconds in which a request's body must arrive."""
    drain_timeout_s: float = _connections(30.0, minimum=0, old_options=("--drain-timeout",))
    """Seconds that running requests may continue after SIGTERM."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a setting is out of range, or would admit everyone."""
        check_settings(self)
        if self.keys_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and without keys "
                "all clients may administer it: give a keys_file, or host='127.0.0.1'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ListenerConfig):
    """Settings of the server, in addition to those of its engine."""

    model_names: tuple[str, ...] = _server(
        ("tiny-shakespeare",), options=("--name", "--served-model-name")
    )
    """Names of the model for clients, of which responses use the first; by default the model
    argument."""
    allowed_origins: tuple[str, ...] = _server((), options=("--allowed-origin",))
    """Origins of web pages that may send requests (CORS); ``*`` is all."""
    tls_key_file: str | None = _server(None, old_options=("--tls-key",))
    """File of a private key, for TLS; without it the server speaks plain HTTP."""
    tls_certificate_file: str | None = _server(None, old_options=("--tls-certificate",))
    """File of the certificate chain of ``tls_key_file``."""
    lora_folders: tuple[str, ...] = _server((), options=("--lora-folder",), page="adapters.md")
    """Folders that adapters may be loaded from over HTTP."""
    explainer: str | None = _server(None, page="learn.md")
    """Function that explains misses beside the engine, as ``FILE.py:function``."""
    max_requests: int = same_setting(ListenerConfig, "max_requests")
    """Maximum concurrent continuations, running and waiting; beyond that, requests get 429."""
    key_share: float = _limits(0.5, above=0, maximum=1)
    """Share of ``max_requests`` that one key may have while no other key has any. With several busy
    keys each gets less, so that a part stays free; an entry's own ``max_requests`` replaces it."""
    max_n: int = _limits(128, minimum=1)
    """Maximum continuations of one prompt."""
    max_texts: int = _limits(1024, minimum=1, page="scoring.md")
    """Maximum texts or documents of a request that embeds, scores or classifies."""
    max_text_tokens: int = _limits(2**20, minimum=1, page="scoring.md")
    """Maximum tokens of them together; those of a shared query count for each document."""
    max_json_depth: int = _limits(64, minimum=1)
    """Maximum nesting of brackets in a body."""
    max_json_items: int | None = _limits(None, minimum=1)
    """Maximum JSON values in a body; by default 8 per token of the model's context, and at least
    262,144."""
    max_json_objects: int = _limits(16384, minimum=1)
    """Maximum JSON objects in a body, such as messages and their parts; each costs the event loop
    several microseconds."""
    max_unread_bytes: int = _limits(16 * 2**20, minimum=1, old_options=("--max-unread",))
    """Computed output that a client may leave unread before it is disconnected."""
    max_tenant_unread_bytes: int = _limits(
        128 * 2**20, minimum=1, old_options=("--max-tenant-unread",)
    )
    """Maximum total unread output of one tenant."""
    min_body_rate: int = _connections(1024, minimum=1, unit="bytes")
    """Bytes per second that a body must bring, after ``header_timeout_s``."""
    send_timeout_s: float = _connections(30.0, above=0, old_options=("--send-timeout",))
    """Seconds in which a client must take 16 KiB of its response, or all that waits."""
    tool_call_parser: str = _answers("auto", choices=("auto", *TOOL_FORMATS))
    """Format of tool calls; ``auto`` detects it in the chat template."""
    reasoning_parser: str | None = _answers(None, choices=tuple(REASONING_FORMATS))
    """Format of reasoning, which then has a field of its own; else it is part of the text."""
    strict_fields: bool = _answers(False)
    """Refuse requests with fields that this server does not know; by default a header of the
    response names them."""
    stabilise: str | None = _answers(None, page="agents.md#volatile-bytes")
    """File of rules for texts that clients change without meaning, such as a date: a constant takes
    their place, so that what follows hits. ``ostinato lint --fix`` writes one."""
    keep_checksums: bool = _answers(False)
    """Keep the checksum in the first line of Claude Code's system text, which makes every
    conversation miss; by default it is set aside."""
    metrics_tenant_names: bool = _observing(False)
    """Name tenants in metrics and spans; by default they are numbered."""
    otel_traces: bool = _observing(False, page="observing.md")
    """Send a span per request to OpenTelemetry; needs ``ostinato[otel]``."""
    traces_folder: str | None = _observing(
        None, page="administration.md", old_options=("--traces",)
    )
    """Folder for traces that ``ostinato cache record`` starts; without it nothing is recorded."""

    def __post_init__(self) -> None:
        """Refuse settings that are out of range or contradict each other.

        Raises:
            ConfigError: The message names the value and what to set instead.
        """
        ListenerConfig.__post_init__(self)  # super() does not know a class with slots
        if (self.tls_key_file is None) != (self.tls_certificate_file is None):
            raise ConfigError(
                f"tls_key_file={self.tls_key_file!r}, tls_certificate_file="
                f"{self.tls_certificate_file!r}: TLS needs both"
            )
        for path in filter(None, (self.tls_key_file, self.tls_certificate_file)):
            if not Path(path).is_file():
                raise ConfigError(f"{path!r}: TLS needs this file, and it does not exist")
        for folder in self.lora_folders:
            if not Path(folder).is_dir():
                raise ConfigError(f"lora_folders={folder!r}: there is no such folder")
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"model_names={self.model_names!r}: needs a name, and none is empty")

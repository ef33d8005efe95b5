"""Settings of a server."""

from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from ostinato.core.config import at_least, one_of
from ostinato.core.errors import ConfigError
from ostinato.server.answers.answer_formats import REASONING_FORMATS, TOOL_FORMATS


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address; of names, only ``localhost`` is trusted."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_address(address: str) -> bool:
    """Return whether a URL, or ``//host:port``, has a loopback host."""
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:  # not an address
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server, in addition to those of its engine.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.
        model_names: Names of the model; the first one is used in responses.
        keys_file: API keys; None admits all clients, and then ``host`` must be loopback.
        max_requests: Concurrent continuations in the engine, running and waiting; beyond that,
            requests get 429.
        key_share: Share of ``max_requests`` that one key may have while no other key has any; with
            several busy keys each gets less, so that a part stays free. An entry's own
            ``max_requests`` replaces it.
        max_n: Maximum number of continuations of one prompt.
        max_body_bytes: Maximum length of a request's body.
        max_tenant_body_bytes: Maximum total of the bodies of one tenant's unfinished requests.
        max_json_depth: Maximum nesting of brackets in a body.
        max_json_items: Maximum number of values in a body; None is eight per token of the model's
            context, and at least 262,144.
        max_json_objects: Maximum number of objects in a body, such as messages and their parts;
            each costs the event loop several microseconds.
        max_connections: Open connections; fewer if the process may open fewer files.
        max_connections_per_address: Open connections of one address.
        header_timeout_s: Time limit for a request's head.
        body_timeout_s: Time limit for its body.
        min_body_rate: Bytes per second that a body must bring, after ``header_timeout_s``.
        send_timeout_s: Time limit for a client to take 16 KiB of a response, or all that waits.
        max_unread_bytes: Computed output that a client may leave unread; beyond that, its
            connection is closed.
        max_tenant_unread_bytes: Maximum total of one tenant's unread output.
        allowed_origins: Origins of web pages that may send requests (CORS); ``*`` is all.
        tls_key_file: Private key for TLS, with ``tls_certificate_file``; None speaks plain HTTP.
        tls_certificate_file: Certificate chain for TLS.
        tool_call_parser: Format of tool calls; ``auto`` detects it in the chat template.
        reasoning_parser: Format of reasoning; None leaves it in the answer's text.
        drain_timeout_s: How long running requests may continue after SIGTERM.
        traces_folder: Folder for recordings; None disables recording.
        lora_folders: Folders that adapters may be loaded from over HTTP; may be empty.
        metrics_tenant_names: Whether metrics and spans name tenants; by default they number them.
        strict_fields: Whether fields that this server does not know are refused with 400.
        keep_checksums: Whether the checksum in the first line of Claude Code's system text stays,
            which differs from conversation to conversation, so that none of them hits another's.
        explainer: Function that explains misses beside the engine, as ``FILE.py:function``; None
            for none.
        otel_traces: Whether spans are sent to OpenTelemetry; needs the extra ``otel``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ("tiny-shakespeare",)
    keys_file: str | None = None
    max_requests: int = 1024
    key_share: float = 0.5
    max_n: int = 128
    max_body_bytes: int = 8 * 2**20
    max_tenant_body_bytes: int = 64 * 2**20
    max_json_depth: int = 64
    max_json_items: int | None = None
    max_json_objects: int = 16384
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    min_body_rate: int = 1024
    send_timeout_s: float = 30.0
    max_unread_bytes: int = 16 * 2**20
    max_tenant_unread_bytes: int = 128 * 2**20
    allowed_origins: tuple[str, ...] = ()
    tls_key_file: str | None = None
    tls_certificate_file: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    drain_timeout_s: float = 30.0
    metrics_tenant_names: bool = False
    strict_fields: bool = False
    keep_checksums: bool = False
    otel_traces: bool = False
    explainer: str | None = None
    traces_folder: str | None = None
    lora_folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse settings that are out of range or would admit everyone.

        Raises:
            ConfigError: The message names the value and what to set instead.
        """
        at_least("port", self.port, 0)
        for name, value in asdict(self).items():
            if name.startswith("max_") and value is not None:
                at_least(name, value, 1)
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s", "min_body_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if not 0 < self.key_share <= 1:
            raise ConfigError(f"key_share={self.key_share!r}: must be above 0 and at most 1")
        if self.port > 65535:
            raise ConfigError(f"port={self.port}: must be at most 65535")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s!r}: must be at least 0")
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
        one_of("tool_call_parser", self.tool_call_parser, ("auto", *TOOL_FORMATS))
        if self.reasoning_parser is not None:
            one_of("reasoning_parser", self.reasoning_parser, tuple(REASONING_FORMATS))
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"model_names={self.model_names!r}: needs a name, and none is empty")
        if self.keys_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and without keys "
                "all clients may administer it: give a keys file, or host='127.0.0.1'"
            )

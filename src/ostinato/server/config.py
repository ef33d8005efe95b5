"""Settings of a server."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from ostinato.core.config import at_least
from ostinato.core.errors import ConfigError
from ostinato.server.answer_formats import REASONING_FORMATS, TOOL_FORMATS


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host; of names, ``localhost`` alone is trusted."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server, besides those of its engine.

    Attributes:
        host: Where to listen.
        port: Where to listen; 0 takes any free port.
        model_names: What clients may call the model; the first one is shown to them.
        keys_file: Who may call; None lets everybody in, and then ``host`` must be loopback.
        max_requests: Continuations that may be under way at once, running and waiting; what
            comes on top is answered with 429.
        max_n: Most continuations of one prompt.
        max_body_bytes: Longest body of a request.
        max_tenant_body_bytes: Bodies of one tenant's requests under way together.
        max_json_depth: Most brackets inside each other in a body.
        max_json_items: Most values in a body; None is eight for each token that the model can
            hold, and at least 262,144.
        max_connections: Open connections; fewer where the process may open fewer files.
        max_connections_per_address: Those of one address.
        header_timeout_s: Time for a request's head.
        body_timeout_s: Time for its body.
        allowed_origins: Origins of web pages that may call from browsers; empty is none, ``*`` all.
        tls_key_file: Private key for TLS, with ``tls_certificate_file``; None speaks plain HTTP.
        tls_certificate_file: Certificate chain for TLS.
        tool_call_parser: Format of calls of tools; ``auto`` is what the chat template shows.
        reasoning_parser: Format of reasoning; None leaves it in the answer's text.
        drain_timeout_s: How long running requests may go on after SIGTERM.
        traces_folder: Where the administrator's recordings go; None records nothing.
        lora_folders: Folders that adapters may be loaded from over HTTP; empty loads none.
        metrics_tenant_names: Whether metrics and spans may name tenants; else metrics number them.
        otel_traces: Whether spans are sent to OpenTelemetry; needs the extra ``otel``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ("tiny-shakespeare",)
    keys_file: str | None = None
    max_requests: int = 1024
    max_n: int = 128
    max_body_bytes: int = 8 * 2**20
    max_tenant_body_bytes: int = 64 * 2**20
    max_json_depth: int = 64
    max_json_items: int | None = None
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    tls_key_file: str | None = None
    tls_certificate_file: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    drain_timeout_s: float = 30.0
    metrics_tenant_names: bool = False
    otel_traces: bool = False
    traces_folder: str | None = None
    lora_folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be, or would let everybody in.

        Raises:
            ConfigError: Naming the value and what to set instead.
        """
        at_least("port", self.port, 0)
        for name in (
            "max_requests",
            "max_n",
            "max_body_bytes",
            "max_tenant_body_bytes",
            "max_json_depth",
            "max_connections",
            "max_connections_per_address",
        ):
            at_least(name, getattr(self, name), 1)
        if self.max_json_items is not None:
            at_least("max_json_items", self.max_json_items, 1)
        for name in ("header_timeout_s", "body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if self.port > 65535:
            raise ConfigError(f"port={self.port}: must be at most 65535")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s!r}: must be at least 0")
        if (self.tls_key_file is None) != (self.tls_certificate_file is None):
            raise ConfigError(
                f"tls_key_file={self.tls_key_file!r}, tls_certificate_file="
                f"{self.tls_certificate_file!r}: TLS needs both of them"
            )
        for path in filter(None, (self.tls_key_file, self.tls_certificate_file)):
            if not Path(path).is_file():
                raise ConfigError(f"{path!r}: there is no such file, and TLS needs it")
        for folder in self.lora_folders:
            if not Path(folder).is_dir():
                raise ConfigError(f"lora_folders={folder!r}: there is no such folder")
        if self.tool_call_parser not in ("auto", *TOOL_FORMATS):
            raise ConfigError(
                f"tool_call_parser={self.tool_call_parser!r}: choose one of auto, "
                f"{', '.join(TOOL_FORMATS)}"
            )
        if self.reasoning_parser not in (None, *REASONING_FORMATS):
            raise ConfigError(
                f"reasoning_parser={self.reasoning_parser!r}: choose one of "
                f"{', '.join(REASONING_FORMATS)}"
            )
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"model_names={self.model_names!r}: needs a name, and none is empty")
        if self.keys_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from elsewhere, and without keys everybody "
                "may read and administer everything: give a keys file, or host='127.0.0.1'"
            )

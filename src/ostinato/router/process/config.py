"""Settings of a router process, and the format of workers on the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import force_setattr

from ostinato.core.config import at_least
from ostinato.core.errors import ConfigError
from ostinato.plugins.loading import is_plugin
from ostinato.router.policy import POLICIES
from ostinato.router.process.prompts import MAX_PROMPT_CHARACTERS
from ostinato.server.config import is_loopback


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of one engine's server.

    Attributes:
        url: ``http://host:port``, without a path.
        name: Name in headers, metrics and logs; by default ``host:port``.
        events: ZeroMQ endpoint of its KV events; None asks the worker, if it is an Ostinato.
        replay: ZeroMQ endpoint for missed events.
        topic: Topic of its events; empty is all.
    """

    url: str
    name: str = ""
    events: str | None = None
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        """Derive the name; raise ConfigError if an address is invalid."""
        try:
            parts = urlsplit(self.url)
            extras = (parts.path.strip("/"), parts.query, parts.fragment, parts.username)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or any(extras):
            raise ConfigError(
                f"worker={self.url!r:.200}: must be http://host:port or https://host:port, without "
                "a path, a query or a password"
            )
        name = self.name or parts.netloc
        if len(name) > 100 or not (name.isascii() and name.isprintable()):
            raise ConfigError(f"name={name!r:.200}: a worker's name has 1 to 100 ASCII characters")
        for label, endpoint in (("events", self.events), ("replay", self.replay)):
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
                raise ConfigError(
                    f"{label}={endpoint!r:.200} of worker {name}: must be a ZeroMQ endpoint such "
                    "as tcp://127.0.0.1:5557"
                )
        if self.replay is not None and self.events is None:
            raise ConfigError(f"replay={self.replay!r} of worker {name} without events: give both")
        force_setattr(self, "url", f"{parts.scheme}://{parts.netloc}")
        force_setattr(self, "name", name)

    @classmethod
    def parse(cls, text: str) -> "WorkerSpec":
        """Read ``URL[,name=...][,events=...][,replay=...][,topic=...]``; else ConfigError."""
        url, *pairs = text.split(",")
        fields = dict(pair.partition("=")[::2] for pair in pairs)
        known = cls.__struct_fields__[1:]
        for name in fields:
            if name not in known:
                raise ConfigError(
                    f"worker={text!r:.200}: {name!r} is none of {', '.join(known)}; write "
                    "URL,name=NAME,events=ENDPOINT,replay=ENDPOINT"
                )
        return cls(url, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of a router process.

    Attributes:
        workers: Initial workers; others may join later.
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.
        policy: How workers are chosen, one of ``POLICIES`` or a class as ``FILE.py:Class``.
        tokenizer: Folder, file or hub name of the workers' tokenizer; None asks the workers'
            ``/tokenize``, and works by characters where they have none.
        keys_file: API keys; None admits all clients, and then ``host`` must be loopback.
        worker_key: Sent to the workers for events and snapshots.
        replace_keys: Send ``worker_key`` in place of the callers' keys with every request.
        retries: Other workers to try while no byte was sent.
        max_requests: Maximum concurrent requests; beyond that, 429.
        max_connections: Open connections of clients; fewer if the process may open fewer files.
        max_connections_per_address: Open connections of one address.
        header_timeout_s: Time limit for a request's head.
        max_body_bytes: Maximum length of a request's body.
        max_prompt_characters: Maximum characters, or token ids, of a prompt.
        max_tenant_body_bytes: Maximum total bodies of one tenant's unfinished requests.
        body_timeout_s: Time limit for a request's body.
        connect_timeout_s: Time limit to connect to a worker.
        silence_timeout_s: Time limit without a byte from a worker, or without a byte accepted by a
            client.
        health_interval_s: Time between health checks of a worker.
        drain_timeout_s: How long running requests may continue after SIGTERM.
        max_tracked_tokens: Maximum tokens of tracked prefixes, over all workers.
    """

    workers: tuple[WorkerSpec, ...] = field(default=())
    host: str = "127.0.0.1"
    port: int = 8080
    policy: str = "cache_state"
    tokenizer: str | None = None
    keys_file: str | None = None
    worker_key: str | None = None
    replace_keys: bool = False
    retries: int = 2
    max_requests: int = 4096
    max_connections: int = 8192
    max_connections_per_address: int = 2048
    header_timeout_s: float = 10.0
    max_body_bytes: int = 8 * 2**20
    max_prompt_characters: int = MAX_PROMPT_CHARACTERS
    max_tenant_body_bytes: int = 256 * 2**20
    body_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 600.0
    health_interval_s: float = 2.0
    drain_timeout_s: float = 30.0
    max_tracked_tokens: int = 16_000_000

    @property
    def send_timeout_s(self) -> float:
        """Time limit for a client to take a part of its response."""
        return self.silence_timeout_s

    def __post_init__(self) -> None:
        """Raise ConfigError if a setting is out of range."""
        at_least("port", self.port, 0)
        at_least("retries", self.retries, 0)
        for name in ("max_requests", "max_connections", "max_connections_per_address"):
            at_least(name, getattr(self, name), 1)
        lengths = ("max_body_bytes", "max_prompt_characters", "max_tenant_body_bytes")
        for name in (*lengths, "max_tracked_tokens"):
            at_least(name, getattr(self, name), 1)
        timeouts = ("header_timeout_s", "body_timeout_s", "connect_timeout_s", "silence_timeout_s")
        for name in (*timeouts, "health_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s!r}: must be at least 0")
        if self.policy not in POLICIES and not is_plugin(self.policy):
            known = ", ".join(POLICIES)
            raise ConfigError(f"policy={self.policy!r}: choose one of {known}, or FILE.py:Class")
        names = [spec.name for spec in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two workers are named {name!r}: give each a name of its own")
        if self.replace_keys and self.worker_key is None:
            raise ConfigError("replace_keys without worker_key: there is no key to send instead")
        if self.keys_file is not None and not Path(self.keys_file).is_file():
            raise ConfigError(f"keys_file={self.keys_file!r}: there is no such file")
        if self.keys_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, and without keys "
                "all clients may administer the fleet: give a keys file, or host='127.0.0.1'"
            )

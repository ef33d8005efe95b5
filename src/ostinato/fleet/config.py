"""What may be set of a router process, and how a worker is named on the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ostinato.core.config import at_least
from ostinato.core.errors import ConfigError
from ostinato.router import POLICIES
from ostinato.server.config import is_loopback

_FIELDS = ("name", "events", "replay", "topic")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One engine's server, as the operator names it.

    Attributes:
        url: ``http://host:port``, without a path.
        name: In headers, metrics and logs; else ``host:port``.
        events: ZeroMQ endpoint of its KV events; None asks the worker, if it is an Ostinato.
        replay: ZeroMQ endpoint for missed events.
        topic: That its events are published under; empty is all.
    """

    url: str
    name: str = ""
    events: str | None = None
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no address, and settle the name.

        Raises:
            ConfigError: Naming the worker and what its address should look like.
        """
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if (
            not is_address
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
            or parts.username
        ):
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
        object.__setattr__(self, "url", f"{parts.scheme}://{parts.netloc}")
        object.__setattr__(self, "name", name)

    @classmethod
    def parse(cls, text: str) -> "WorkerSpec":
        """Read ``URL[,name=...][,events=...][,replay=...][,topic=...]``.

        Raises:
            ConfigError: It is no such thing.
        """
        url, *pairs = text.split(",")
        fields = dict(pair.partition("=")[::2] for pair in pairs)
        for name in fields:
            if name not in _FIELDS:
                raise ConfigError(
                    f"worker={text!r:.200}: {name!r} is none of {', '.join(_FIELDS)}; write "
                    "URL,name=NAME,events=ENDPOINT,replay=ENDPOINT"
                )
        return cls(url, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of a router process.

    Attributes:
        workers: To begin with; others may join later.
        host: Where to listen.
        port: Where to listen; 0 takes any free port.
        policy: How workers are chosen, one of ``POLICIES``.
        tokenizer: Folder, file or hub name of the workers' tokenizer; None asks the workers'
            ``/tokenize``, and works by characters where they have none.
        keys_file: Who may call; None lets everybody in, and then ``host`` must be loopback.
        worker_key: Sent to the workers for events and snapshots.
        replace_keys: Send ``worker_key`` in place of the callers' keys with every request.
        retries: Other workers that are tried while no byte of an answer was sent.
        max_requests: Requests under way at once; what comes on top is answered with 429.
        max_body_bytes: Longest body of a request.
        max_tenant_body_bytes: Bodies of one tenant's requests under way together.
        body_timeout_s: Time for a request's body.
        connect_timeout_s: Time for a connection to a worker.
        silence_timeout_s: Time in which a worker sends nothing of its answer, or a client takes
            nothing of it, before it is given up.
        health_interval_s: Time between two looks at a worker's health.
        drain_timeout_s: How long running requests may go on after SIGTERM.
        max_tracked_tokens: Tokens of all prefixes that are known, over all workers.
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
    max_body_bytes: int = 8 * 2**20
    max_tenant_body_bytes: int = 256 * 2**20
    body_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 600.0
    health_interval_s: float = 2.0
    drain_timeout_s: float = 30.0
    max_tracked_tokens: int = 16_000_000

    def __post_init__(self) -> None:
        """Refuse what cannot be, or would let everybody in.

        Raises:
            ConfigError: Naming the value and what to set instead.
        """
        at_least("port", self.port, 0)
        at_least("retries", self.retries, 0)
        for name in ("max_requests", "max_body_bytes", "max_tenant_body_bytes"):
            at_least(name, getattr(self, name), 1)
        at_least("max_tracked_tokens", self.max_tracked_tokens, 1)
        timeouts = ("body_timeout_s", "connect_timeout_s", "silence_timeout_s")
        for name in (*timeouts, "health_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s!r}: must be at least 0")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: choose one of {', '.join(POLICIES)}")
        names = [spec.name for spec in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two workers are named {name!r}: give them other names")
        if self.replace_keys and self.worker_key is None:
            raise ConfigError("replace_keys without worker_key: there is no key to send instead")
        if self.keys_file is not None and not Path(self.keys_file).is_file():
            raise ConfigError(f"keys_file={self.keys_file!r}: there is no such file")
        if self.keys_file is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from elsewhere, and without keys everybody "
                "may use and administer the fleet: give a keys file, or host='127.0.0.1'"
            )

"""Settings of a router process, and the format of workers on the command line."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import force_setattr

from ostinato.core.errors import ConfigError
from ostinato.core.setting import same_setting, setting
from ostinato.router.policy import RouterConfig
from ostinato.router.process.routing_fields import MAX_PROMPT_CHARACTERS
from ostinato.server.config import CONNECTIONS, LIMITS, SERVER, ListenerConfig

ROUTING = "Routing"
GROUPS = (ROUTING, SERVER, LIMITS, CONNECTIONS)
"""Groups of settings, in the order in which a reader needs them."""

_routing = partial(setting, group=ROUTING)
_policy = partial(same_setting, RouterConfig, group=ROUTING)


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
class FleetConfig(ListenerConfig):
    """Settings of a router process."""

    port: int = same_setting(ListenerConfig, "port", 8080)
    max_requests: int = same_setting(ListenerConfig, "max_requests", 4096)
    max_tenant_body_bytes: int = same_setting(ListenerConfig, "max_tenant_body_bytes", 256 * 2**20)
    max_prompt_characters: int = setting(MAX_PROMPT_CHARACTERS, minimum=1, group=LIMITS)
    """Maximum characters, or token ids, of a prompt."""
    workers: tuple[WorkerSpec, ...] = _routing((), parse=WorkerSpec.parse, options=("--worker",))
    """Engines at the start, of which others may join later; each is a URL, and ``,name=``,
    ``,events=``, ``,replay=`` and ``,topic=`` may follow."""
    policy: str = _policy("policy")
    tokenizer: str | None = _routing(None)
    """Folder or hub name of the workers' tokenizer; else their ``/tokenize`` is called, and without
    one the router works by characters."""
    worker_key: str | None = setting(None, group=SERVER, env="OSTINATO_WORKER_KEY")
    """Key for the workers' events and snapshots."""
    replace_keys: bool = setting(False, group=SERVER)
    """Send ``worker_key`` in place of callers' keys."""
    retries: int = _routing(2, minimum=0)
    """Other workers to try, as long as no byte was sent."""
    max_tracked_tokens: int = _policy("max_tracked_tokens", 16_000_000, old_names=())
    guess_ttl_s: float = _policy("guess_ttl_s")
    silent_s: float = _policy("silent_s")
    health_interval_s: float = _routing(2.0, above=0, old_options=("--health-interval",))
    """Seconds between health checks of a worker."""
    connect_timeout_s: float = setting(
        10.0, above=0, group=CONNECTIONS, old_options=("--connect-timeout",)
    )
    """Seconds in which a worker must accept a connection."""
    silence_timeout_s: float = setting(
        600.0, above=0, group=CONNECTIONS, old_options=("--silence-timeout",)
    )
    """Seconds without a byte from a worker, or without a byte accepted by a client, after which it
    is given up."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a setting is out of range, or two contradict each other."""
        ListenerConfig.__post_init__(self)  # super() does not know a class with slots
        names = [spec.name for spec in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two workers are named {name!r}: give each a name of its own")
        if self.replace_keys and self.worker_key is None:
            raise ConfigError("replace_keys without worker_key: there is no key to send instead")
        if self.keys_file is not None and not Path(self.keys_file).is_file():
            raise ConfigError(f"keys_file={self.keys_file!r}: there is no such file")

"""The state of a running server."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.loop.snapshot import Snapshot, take_snapshot
from ostinato.plugins.explainer import Explainer
from ostinato.protocol.volatile import CHECKSUM_RULES, Stabiliser, read_rules
from ostinato.server.access.callers import AnyCaller, Callers
from ostinato.server.access.rate_limit import RateLimit
from ostinato.server.access.unread_output import UnreadOutput
from ostinato.server.answers.answer_formats import AnswerFormats
from ostinato.server.config import ServerConfig
from ostinato.server.errors import unknown_name
from ostinato.server.held_prefixes import HeldPrefixes
from ostinato.server.response_store import ResponseStore
from ostinato.server.telemetry.engine_watch import EngineWatch
from ostinato.server.telemetry.observer import Observer
from ostinato.server.telemetry.tenant_usage import TenantUsage

logger = logging.getLogger("ostinato")


@dataclass(eq=False)
class ServerState:
    """The state of a server: passed to ``create_app``, available as ``request.app.state.server``.

    Attributes:
        llm: The engine, in a thread of its own.
        config: Server settings.
        callers: Authenticates callers.
        observers: Request observers, ``usage`` included.
        usage: Usage counters of tenants.
        held_prefixes: Leases taken for breakpoints.
        rate_limit: Enforces tenants' limits.
        responses: Stored responses.
        unread: Output that clients have not taken.
        snapshots: The engine's counters, for metrics and the page.
        started_s: Start time, in seconds since 1970.
        formats: Formats of the model's answers.
        stabiliser: Replaces texts that clients change without meaning.
        explainer: Explains misses beside the engine; None if none is configured.
        loading_adapter: Lock held while an adapter is loaded, so that numbers are unique.
        is_draining: Whether it refuses new requests, and ends with the last one.
    """

    llm: AsyncLLM
    config: ServerConfig = field(default_factory=ServerConfig)
    callers: Callers = field(default_factory=AnyCaller)
    observers: list[Observer] = field(default_factory=list)
    usage: TenantUsage = field(default_factory=TenantUsage)
    rate_limit: RateLimit = field(default_factory=RateLimit)
    responses: ResponseStore = field(default_factory=ResponseStore)
    started_s: int = field(default_factory=lambda: int(time.time()))
    unread: UnreadOutput = field(init=False)
    held_prefixes: HeldPrefixes = field(init=False)
    snapshots: EngineWatch[Snapshot] = field(init=False)
    formats: AnswerFormats = field(init=False)
    stabiliser: Stabiliser = field(init=False)
    explainer: Explainer | None = field(init=False)
    loading_adapter: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_draining: bool = False
    _beside: set[asyncio.Task[None]] = field(default_factory=set)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that no response waits for; what it raises is logged."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._end_beside)

    def _end_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work beside the responses failed", exc_info=error)

    @property
    def num_live(self) -> int:
        """Continuations in the engine, running and waiting."""
        return self.rate_limit.num_live

    @property
    def fingerprint(self) -> str:
        """Identifies the current weights; changes when they are updated."""
        return f"fp_{self.llm.engine.loaded.fingerprint.hex()[:16]}"

    def adapter_of(self, name: str) -> str:
        """Return the adapter of a model name; empty for the base model.

        Raises:
            ApiError: This server has no such model (404).
        """
        if name in self.config.model_names:
            return ""
        adapters = self.llm.engine.adapters.by_name
        if name not in adapters:
            known = ", ".join([*self.config.model_names, *adapters])
            raise unknown_name("model", name, f"this server has {known}", "model_not_found")
        return name

    def __post_init__(self) -> None:
        """Create the state, and choose the formats of answers.

        Raises:
            ConfigError: The chosen parsers do not fit the model, or a rule is invalid.
        """
        config, tokenizer = self.config, self.llm.engine.loaded.tokenizer
        self.formats = AnswerFormats.of(tokenizer, config.tool_call_parser, config.reasoning_parser)
        rules = () if config.keep_checksums else CHECKSUM_RULES
        self.stabiliser = Stabiliser((*rules, *read_rules(config.stabilise)))
        self.unread = UnreadOutput(config.max_unread_bytes, config.max_tenant_unread_bytes)
        self.held_prefixes = HeldPrefixes(self.llm)
        self.snapshots = EngineWatch(self.llm, take_snapshot)
        self.explainer = None if config.explainer is None else Explainer(config.explainer)
        self.observers.append(self.usage)


async def state_of(request: Request) -> ServerState:
    """Return the state of the server that received a request."""
    state: ServerState = request.app.state.server
    return state


StateDep = Annotated[ServerState, Depends(state_of)]
"""Write ``state: StateDep`` in the signature of a route."""

"""What one server knows while it runs."""

import asyncio
import time
from dataclasses import dataclass, field

from ostinato.engine.async_llm import AsyncLLM
from ostinato.server.answer_formats import AnswerFormats
from ostinato.server.callers import AnyCaller, Callers
from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError, stopping
from ostinato.server.held_prefixes import HeldPrefixes
from ostinato.server.observer import Observer
from ostinato.server.rate_limit import RateLimit
from ostinato.server.response_store import ResponseStore
from ostinato.server.tenant_usage import TenantUsage


@dataclass(eq=False)
class ServerState:
    """One server: handed to ``create_app``, and found again as ``request.app.state.server``.

    Attributes:
        llm: The engine, in a thread of its own.
        config: As given.
        callers: Tells callers apart.
        observers: Who watches the requests; ``usage`` is one of them.
        usage: What the cache did for whom.
        held_prefixes: What clients asked to keep with breakpoints.
        rate_limit: Keeps tenants to their limits.
        responses: What can be continued by its name.
        started_s: When it was made, in seconds since 1970.
        formats: How answers of the model are written.
        num_live: Continuations under way, running and waiting.
        loading_adapter: Held while one is loaded, so that each gets a number of its own.
        is_draining: Whether it takes no more requests, and ends when the last has ended.
    """

    llm: AsyncLLM
    config: ServerConfig = field(default_factory=ServerConfig)
    callers: Callers = field(default_factory=AnyCaller)
    observers: list[Observer] = field(default_factory=list)
    usage: TenantUsage = field(default_factory=TenantUsage)
    rate_limit: RateLimit = field(default_factory=RateLimit)
    responses: ResponseStore = field(default_factory=ResponseStore)
    started_s: int = field(default_factory=lambda: int(time.time()))
    held_prefixes: HeldPrefixes = field(init=False)
    formats: AnswerFormats = field(init=False)
    num_live: int = 0
    loading_adapter: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_draining: bool = False

    @property
    def fingerprint(self) -> str:
        """Which weights answer now: changes when new ones are put in their place."""
        return f"fp_{self.llm.engine.loaded.fingerprint.hex()[:16]}"

    def __post_init__(self) -> None:
        """Count usage, and settle how answers are read.

        Raises:
            ConfigError: The model does not fit the parsers that were chosen.
        """
        config, tokenizer = self.config, self.llm.engine.loaded.tokenizer
        self.formats = AnswerFormats.of(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.held_prefixes = HeldPrefixes(self.llm)
        self.observers.append(self.usage)

    def enter(self, num_sequences: int) -> None:
        """Let the continuations of one prompt in; ``leave`` lets them out again.

        Raises:
            ApiError: As ``check_room``.
        """
        self.check_room(num_sequences, num_sequences)
        self.num_live += num_sequences

    def leave(self, num_sequences: int) -> None:
        """Let continuations out."""
        self.num_live -= num_sequences
        assert self.num_live >= 0, "more requests left than entered"

    def check_room(self, num_sequences: int, num_per_prompt: int) -> None:
        """Refuse what does not fit, before anything of it begins.

        Args:
            num_sequences: Continuations of all prompts of a call.
            num_per_prompt: Of each of them.

        Raises:
            ApiError: There is no room now (429) or ever (400), or the server drains (503).
        """
        if self.is_draining:
            raise stopping("the server is shutting down: send the request to another one")
        if num_per_prompt > self.config.max_n:
            raise _too_many("n", num_per_prompt, self.config.max_n, "--max-n")
        most = self.config.max_requests
        if num_sequences > most:
            raise _too_many("prompts times n", num_sequences, most, "--max-requests")
        if self.num_live + num_sequences > most:
            raise ApiError(
                429,
                "the server is at capacity: retry after 1 s",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )


def _too_many(name: str, value: int, most: int, option: str) -> ApiError:
    """Return the refusal of what can never fit."""
    return ApiError(
        400,
        f"{name}={value}: at most {most} on this server; ask for fewer, or raise {option}",
        param="n",
        code="too_many_continuations",
    )

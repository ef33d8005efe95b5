"""What does one server know while it runs?"""

import time
from dataclasses import dataclass, field

from ostinato.engine.async_llm import AsyncLLM
from ostinato.server.callers import AnyCaller, Callers
from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError, stopping
from ostinato.server.observer import Observer


@dataclass(eq=False)
class ServerState:
    """One server: handed to ``create_app``, and found again as ``request.app.state.server``.

    Attributes:
        llm: The engine, in a thread of its own.
        config: As given.
        callers: Tells callers apart.
        observers: Who watches the requests.
        started_s: When it was made, in seconds since 1970.
        num_live: Continuations under way, running and waiting.
        is_draining: Whether it takes no more requests, and ends when the last has ended.
    """

    llm: AsyncLLM
    config: ServerConfig = field(default_factory=ServerConfig)
    callers: Callers = field(default_factory=AnyCaller)
    observers: list[Observer] = field(default_factory=list)
    started_s: int = field(default_factory=lambda: int(time.time()))
    num_live: int = 0
    is_draining: bool = False

    def enter(self, num_sequences: int) -> None:
        """Let continuations in; ``leave`` lets them out again.

        Raises:
            ApiError: There is no room now (429) or ever (400), or the server drains (503).
        """
        most = self.config.max_requests
        if self.is_draining:
            raise stopping("the server is shutting down: send the request to another one")
        if num_sequences > most:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} continuations at once, and this server "
                f"takes {most}: ask for fewer, or raise --max-requests",
                code="too_many_continuations",
            )
        if self.num_live + num_sequences > most:
            raise ApiError(
                429,
                f"{self.num_live} continuations are under way and at most {most} may be: "
                "come again in a second",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_live += num_sequences

    def leave(self, num_sequences: int) -> None:
        """Let continuations out."""
        self.num_live -= num_sequences
        assert self.num_live >= 0, "more requests left than entered"

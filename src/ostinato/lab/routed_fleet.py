"""The router library in the simulated fleet."""

from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.timed_replay import spell
from ostinato.observe import events as observed
from ostinato.router import Decision, Router, RouterConfig, RouteRequest
from ostinato.router.events import Cleared, Event, EventBatch, Removed, Stored


class LibraryDispatcher:
    """One router, or several side by side that know nothing of each other's requests."""

    def __init__(
        self, trace: BlockTrace, num_replicas: int, config: RouterConfig, num_routers: int = 1
    ) -> None:
        """Let all replicas join.

        Args:
            trace: Whose requests are routed, by number.
            num_replicas: Workers are named by their numbers.
            config: Settings of each router.
            num_routers: Requests take turns.
        """
        self._trace = trace
        self._routers = [Router(config) for _ in range(num_routers)]
        self._decisions: dict[int, Decision] = {}
        self._sessions: dict[int, str] = {}  # by the block that ended a prompt
        for replica in range(num_replicas):
            self.back(replica, 0.0)

    def _router(self, number: int) -> Router:
        return self._routers[number % len(self._routers)]

    def route(self, number: int, now_s: float) -> int:
        """Return the replica for a request."""
        trace = self._trace
        num_tokens = int(trace.input_tokens[number])
        prompt = spell(trace.path(number), trace.block_tokens, num_tokens, number)
        decision = self._router(number).route(
            RouteRequest(prompt, session=self._session(number)), now_s
        )
        assert decision is not None, "some replica is always there"
        self._decisions[number] = decision
        return int(decision.worker)

    def _session(self, number: int) -> str:
        """Return the session that a request goes on with: it begins with all of an earlier one."""
        path = self._trace.path(number).tolist()
        known = (self._sessions[block] for block in reversed(path) if block in self._sessions)
        session = next(known, str(number))
        if path:
            self._sessions[path[-1]] = session
        return session

    def first_token(self, number: int, now_s: float) -> None:
        """Note that a request's prompt is computed."""
        self._router(number).first_token(self._decisions[number], now_s)

    def finished(self, number: int, now_s: float) -> None:
        """Note that a request ended."""
        self._router(number).finished(self._decisions.pop(number), now_s)

    def failed(self, number: int, now_s: float) -> None:
        """Note that a request's replica was lost."""
        self._router(number).failed(self._decisions.pop(number), now_s)

    def events(self, replica: int, batch: observed.EventBatch, now_s: float) -> None:
        """Take a replica's KV events."""
        heard = EventBatch(batch.sequence, batch.time_s, tuple(map(_heard, batch.events)))
        for router in self._routers:
            router.apply(str(replica), heard, now_s)

    def lost(self, replica: int, now_s: float) -> None:
        """Note that a replica is gone."""
        for router in self._routers:
            router.remove(str(replica))

    def back(self, replica: int, now_s: float) -> None:
        """Note that a replica is back, with nothing cached."""
        for router in self._routers:
            router.add_worker(str(replica), block_size=self._trace.block_tokens)


def _heard(event: observed.Event) -> Event:
    """Return an event as the router takes it."""
    if isinstance(event, observed.BlockStored):
        window = event.group > 0
        return Stored(
            event.digests, event.parent, event.tokens, event.block_size, group=event.group,
            is_window=window,
        )  # fmt: skip
    if isinstance(event, observed.BlockRemoved):
        return Removed(event.digests, group=event.group)
    return Cleared()

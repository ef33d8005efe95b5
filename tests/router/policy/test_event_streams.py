"""Random streams of events against an oracle that knows the truth.

The oracle is the worker itself: after each batch it remembers which prefixes it holds. A stream
loses, repeats and delays batches, restarts, lies; replays and snapshots come or do not. Whatever
happened, a worker that is called exact has exactly what the router says it has, and no worker
that tells the truth is said to have what it never had in this life.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.router import Resync, WorkerState
from ostinato.router.policy.events import EventBatch, Stored
from tests.router.fleets import batch, cleared, fleet, prompt, removed, stored

PREFIXES = ["AAAA", "AAAABBBB", "AAAABBBBAAAA", "AAAABBBBBBBB", "BBBB", "BBBBAAAA", "BBBBAAAABBBB"]
"""Ends of all prefixes that the worker may store: a tree of seven blocks."""

WAITS = st.sampled_from([False, False, False, True])
"""Whether a batch is still on its way when the next thing happens."""

KEPT = 4
"""Batches that the worker can replay."""


class Worker:
    """Sends events, and knows what it holds."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.held: set[str] = set()
        self.sent: list[EventBatch] = []

    def send(self, *events) -> EventBatch:
        self.clock[0] += 1.0
        self.sent.append(batch(len(self.sent), *events, time_s=self.clock[0]))
        return self.sent[-1]

    def store(self, prefix: str) -> EventBatch:
        """Store a prefix with all that is missing before it, as an engine does."""
        missing = [e for e in PREFIXES if prefix.startswith(e) and e not in self.held]
        self.held.update(missing)
        missing.sort(key=len)
        return self.send(*(stored(end[-4:], behind=end[:-4]) for end in missing))

    def evict(self, prefix: str) -> EventBatch:
        """Evict a leaf below a prefix, or the prefix itself."""
        leaf = max((e for e in self.held if e.startswith(prefix)), key=len)
        self.held.discard(leaf)
        return self.send(removed(leaf))

    def clear(self) -> EventBatch:
        self.held.clear()
        return self.send(cleared())

    def cached(self, prompt_text: str) -> int:
        """Tokens of a prompt that are cached, found the slow way."""
        depth = 0
        while prompt_text[: depth + 4] in self.held and depth + 4 <= len(prompt_text):
            depth += 4
        return depth


class EventStreams(RuleBasedStateMachine):
    """One worker and its router, and a network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = fleet("ab", max_tracked_tokens=10_000)
        self.clock = [0.0]
        self.worker = Worker(self.clock)
        self.on_the_way: list[EventBatch] = []
        self.resync: Resync | None = None

    def happen(self, sent: EventBatch, waits: bool) -> None:
        self.on_the_way.append(sent)
        while self.on_the_way and not waits:
            self.arrive()

    def _ask(self, resync) -> None:
        self.resync = resync or self.resync
        if self.router.workers()[0].state is not WorkerState.DEGRADED:
            self.resync = None

    @rule(prefix=st.sampled_from(PREFIXES), waits=WAITS)
    def store(self, prefix, waits):
        self.happen(self.worker.store(prefix), waits)

    @precondition(lambda self: self.worker.held)
    @rule(data=st.data(), waits=WAITS)
    def evict(self, data, waits):
        prefix = data.draw(st.sampled_from(sorted(self.worker.held)))
        self.happen(self.worker.evict(prefix), waits)

    @rule(waits=WAITS)
    def clear(self, waits):
        self.happen(self.worker.clear(), waits)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrive(self):
        self._ask(self.router.apply("a", self.on_the_way.pop(0)))

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrive_twice(self):
        self._ask(self.router.apply("a", self.on_the_way[0]))

    @precondition(lambda self: self.on_the_way)
    @rule()
    def get_lost(self):
        self.on_the_way.pop(0)

    @rule()
    def restart(self):
        """What was on its way is lost with the connection, which the process notices."""
        self.worker = Worker(self.clock)
        self.on_the_way.clear()
        self._ask(self.router.restarted("a"))

    @precondition(lambda self: self.worker.sent)
    @rule(waits=WAITS)
    def lie(self, waits):
        """Two blocks of four tokens, and three tokens."""
        self.happen(self.worker.send(Stored((b"x", b"y"), None, (1, 2, 3), 4)), waits)

    @precondition(lambda self: self.resync is not None)
    @rule()
    def replay(self):
        """The worker replays what it kept, from the number that was asked for."""
        asked = self.resync.replay_from
        kept = [each for each in self.worker.sent[-KEPT:] if each.sequence >= asked]
        self.resync = None
        self._ask(self.router.replayed("a", kept))

    @precondition(lambda self: self.resync is not None)
    @rule()
    def snapshot(self):
        events = [stored(end[-4:], behind=end[:-4]) for end in sorted(self.worker.held, key=len)]
        self.resync = None
        sequence = len(self.worker.sent)
        self._ask(self.router.restore("a", sequence, batch(sequence, *events)))

    @precondition(lambda self: self.resync is not None)
    @rule()
    def give_up(self):
        self.resync = None
        self.router.forget("a")

    @rule(prefix=st.sampled_from(PREFIXES), end=st.sampled_from(["first", "done", "failed"]))
    def request(self, prefix, end):
        decision = self.router.route(prompt(prefix + "C"), self.clock[0])
        if end == "first":
            self.router.first_token(decision)
        elif end == "done":
            self.router.finished(decision, self.clock[0])
        else:
            self.router.failed(decision)

    @invariant()
    def nothing_is_silently_wrong(self):
        self.router.check()
        status = self.router.workers()[0]
        if status.state is not WorkerState.EXACT:
            return
        if status.next_batch != len(self.worker.sent):
            return  # exact as of an earlier batch: the rest is on its way, or lost unheard
        for prefix in PREFIXES:
            found = self.router.look_up(prompt(prefix + "C"), self.clock[0])[0]
            assert found.cached_tokens == self.worker.cached(prefix), (prefix, status)


EventStreams.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestEventStreams = EventStreams.TestCase

"""Publishes KV events from a thread that owns the sockets.

The engine's thread only puts batches into a bounded queue::

    engine thread                     publisher thread
    EventLog.flush ──► queue ──► PUB  [topic, number, payload]           to all subscribers
    EventLog (kept batches) ◄──► ROUTER  [b"", start] ◄── consumer with a gap
                                        [b"", number, payload] ... [b"", -1, b""] ──►

Rules:

1. The engine never waits: batches that do not fit the queue are not sent. They keep their
   numbers, so a consumer sees the gap and requests a replay.
2. A replay reads the log itself, not copies: what is erased there is not replayed.
3. Numbers are 8 bytes, big-endian. The end of a replay is number -1 with no payload. An end
   without batches means that they are no longer kept, and the consumer starts over.

Source: vLLM's documentation of KV events (PUB and ROUTER sockets, frames, end marker).
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from ostinato.assembly import PrefixCache
from ostinato.core.errors import ConfigError
from ostinato.engine.loop.kv_events_wire import BatchEncoder
from ostinato.engine.settings.config import EngineConfig
from ostinato.observe.events import EventBatch, EventLog

logger = logging.getLogger("ostinato")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""In place of a number, after the last batch of a replay."""

MAX_QUEUED_BATCHES = 4096
"""Batches queued between the engine and the sockets."""

MAX_UNREAD_BATCHES = 4096
"""Batches queued for a slow consumer; it misses further ones."""

LINGER_MS = 500
"""How long closing waits for consumers to receive sent batches."""

SEND_S = 10.0
"""How long erasing waits for queued batches; sending never blocks, so only a fault takes it."""


class KVEventsPublisher:
    """Publishes the batches of an event log over ZeroMQ until it is closed."""

    def __init__(
        self,
        log: EventLog,
        encoder: BatchEncoder,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        max_queued: int = MAX_QUEUED_BATCHES,
    ) -> None:
        """Bind the sockets, start the thread and subscribe to the log.

        Args:
            log: The event log.
            encoder: Encodes its batches.
            endpoint: As ZeroMQ names it, such as ``tcp://127.0.0.1:5557``.
            replay_endpoint: Another one for replays; None answers none.
            topic: First frame of every message.
            max_queued: Batches that may wait for the thread.

        Raises:
            ConfigError: An endpoint cannot be bound.
        """
        self.num_dropped = 0  # batches that did not fit the queue
        self._log = log
        self._encoder = encoder
        self._topic = topic.encode()
        self._queue: deque[EventBatch] = deque()
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._closed = False
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(MAX_UNREAD_BATCHES)
        self._router: zmq.Socket[bytes] | None = None
        # With the actual port if 0 was configured.
        self.endpoint = self._bind("kv_events_endpoint", self._publisher, endpoint)
        self.replay_endpoint: str | None = None  # None answers no replays
        if replay_endpoint is not None:
            self._router = self._open_router()
            self.replay_endpoint = self._bind(
                "kv_events_replay_endpoint", self._router, replay_endpoint
            )
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._thread = threading.Thread(target=self._serve, name="ostinato-kv-events", daemon=True)
        self._thread.start()
        log.subscribe(self._enqueue, self.wait_until_sent)

    @property
    def is_running(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    @property
    def num_queued(self) -> int:
        """Batches that wait for the thread."""
        return len(self._queue)

    def encode(self, batch: EventBatch) -> bytes:
        """Return a batch as subscribers get it; in any thread."""
        return self._encoder.encode(batch)

    def wait_until_sent(self) -> None:
        """Wait until ZeroMQ has every batch so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._closed, SEND_S)

    def close(self) -> None:
        """Send queued batches and close the sockets; a second call does nothing.

        Cost: at most about ``LINGER_MS``, if a consumer is stuck.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._wake()
        if threading.current_thread() is not self._thread:  # garbage collection may run there
            self._thread.join()

    # --- the engine's thread ---

    def _enqueue(self, batch: EventBatch) -> None:
        """Queue a batch, or drop it (rule 1)."""
        with self._changed:
            if self._closed:
                return
            if len(self._queue) >= self._max_queued:
                self.num_dropped += 1
                return
            self._queue.append(batch)
            self._wake()

    def _wake(self) -> None:
        """Wake the publisher's thread, with the lock held; a full pipe wakes it already."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._ring, b"!")

    # --- the publisher's thread ---

    def _serve(self) -> None:
        """Send and answer until closed. A bug ends the events and nothing else."""
        try:
            self._run()
        except Exception:
            logger.exception("KV events ended; the engine continues without them")
        finally:
            with self._changed:  # no more wake-ups from here on
                self._closed = True
                self._queue.clear()
                self._changed.notify_all()
            self._context.destroy(linger=LINGER_MS)
            os.close(self._bell)
            os.close(self._ring)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._bell in ready:
                os.read(self._bell, 4096)
            self._send_queued()
            if self._router is not None and self._router in ready:
                self._answer(self._router)
        self._send_queued()

    def _send_queued(self) -> None:
        """Publish the queued batches; each counts as queued until ZeroMQ has it."""
        while self._queue:
            batch = self._queue[0]
            self._publisher.send_multipart([self._topic, *self._frames(batch)])
            with self._changed:
                self._queue.popleft()
        with self._changed:
            self._changed.notify_all()

    def _answer(self, router: "zmq.Socket[bytes]") -> None:
        """Answer a request for a replay."""
        request = router.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.warning(
                "a request for a replay of KV events has frames of %s bytes; expected are the "
                "sender's identity, an empty frame, and a number of 8 bytes, big-endian",
                [len(frame) for frame in request],
            )
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        try:
            for batch in self._log.replay(start) or ():
                router.send_multipart([client, b"", *self._frames(batch)], zmq.NOBLOCK)
            router.send_multipart([client, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it disconnected, or does not read: it may retry
            logger.warning("a replay of KV events from %d was given up: %s", start, error)

    def _frames(self, batch: EventBatch) -> tuple[bytes, bytes]:
        return batch.sequence.to_bytes(8, "big"), self.encode(batch)

    # --- sockets ---

    def _open_router(self) -> "zmq.Socket[bytes]":
        """Open a socket with room for two replays of all that is kept, per consumer."""
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raises instead of losing batches
        router.set_hwm(2 * (self._log.max_kept_batches + 1))
        return router

    def _bind(self, setting: str, socket: "zmq.Socket[bytes]", endpoint: str) -> str:
        """Bind, and return the address with its real port.

        Raises:
            ConfigError: It cannot be bound; all sockets are closed.
        """
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{setting}={endpoint!r} cannot be bound: {error.strerror}; choose another "
                "address, such as 'tcp://127.0.0.1:5557' (port 0 takes a free one)"
            ) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def publish_kv_events(
    config: EngineConfig, cache: PrefixCache, device: str, clock: Callable[[], float]
) -> KVEventsPublisher | None:
    """Publish the events of a cache on a device, by its clock; None if no endpoint is set."""
    if config.kv_events_endpoint is None:
        return None
    assert cache.events is not None, "the settings keep events"
    encoder = BatchEncoder(
        "CPU" if device == "cpu" else "GPU",
        tuple(window.window for window in cache.config.windows),
        time.time() - clock(),
    )
    return KVEventsPublisher(
        cache.events,
        encoder,
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        config.kv_events_topic,
    )

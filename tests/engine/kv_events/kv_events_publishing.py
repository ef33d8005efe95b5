"""Publishers and consumers of KV events for tests, on ports of their own."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from ostinato.assembly import PrefixCache
from ostinato.engine.loop.kv_events_publisher import KVEventsPublisher
from ostinato.engine.loop.kv_events_wire import BatchEncoder
from ostinato.observe.events import EventBatch
from tests.engine.kv_events.kv_events_consumer import PATIENCE_MS, Consumer

ANY_PORT = "tcp://127.0.0.1:0"

Publish = Callable[..., KVEventsPublisher]
Listen = Callable[[KVEventsPublisher], Consumer]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Publish caches' events on ports of their own, and close them after the test."""
    publishers: list[KVEventsPublisher] = []

    def start(cache: PrefixCache, encoder: BatchEncoder | None = None, **settings: Any):
        assert cache.events is not None
        windows = tuple(window.window for window in cache.config.windows)
        encoder = encoder or BatchEncoder("CPU", windows)
        publishers.append(KVEventsPublisher(cache.events, encoder, ANY_PORT, ANY_PORT, **settings))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.close()


@pytest.fixture
def listen() -> "Iterator[Listen]":
    """Make consumers, and close their sockets after the test."""
    context, consumers = zmq.Context(), list[Consumer]()

    def start(publisher: KVEventsPublisher) -> Consumer:
        consumers.append(Consumer(context, publisher))
        return consumers[-1]

    yield start
    context.destroy(linger=0)


def meet(consumer: Consumer, cache: PrefixCache) -> None:
    """Clear an empty cache until a consumer hears of it: from then on it hears everything."""
    assert cache.events is not None
    while not consumer.poll(wait_ms=20):
        cache.admin.reset()
    consumer.catch_up()
    assert consumer.next == cache.events.next_sequence
    consumer.num_replayed = 0


def flush(cache: PrefixCache) -> int:
    """End the batch to come, and return the number of the next one."""
    assert cache.events is not None
    cache.events.flush()
    return cache.events.next_sequence


class Gate(BatchEncoder):
    """An encoder that can hold the publisher's thread up."""

    def __init__(self) -> None:
        super().__init__("CPU")
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def encode(self, batch: EventBatch) -> bytes:
        if not self.open.is_set():
            self.reached.set()
        assert self.open.wait(PATIENCE_MS / 1000)
        return super().encode(batch)

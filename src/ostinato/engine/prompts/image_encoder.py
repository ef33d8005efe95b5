"""Runs the encoder of images in a thread of its own, so that no step waits for it.

A request whose images miss is held until they are encoded; the steps of others go on::

    add ──► held ──► looked up ──► thread: one image after the other ──► released ──► planned
                         └─ all images hit, or their outputs are stored: released at once

Rules:

1. Images that hit are neither resized nor encoded. An image is encoded once for all its requests.
2. Tenants take turns, and the thread has at most ``AHEAD`` requests. While the outputs of requests
   that are not computed yet fill the store's budget, no further request is begun.
3. When a request ends, its images are removed, with the output of the one that is being encoded.
4. An image that cannot be encoded ends the requests that wait for it, and no others.
5. A step that still misses an output, such as after a preemption, computes it by itself.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ostinato.core.ids import RequestId
from ostinato.core.request import Request
from ostinato.runner.images.store import ImageStore, ServedImage
from ostinato.runner.images.vision import Pixels
from ostinato.scheduling.held_requests import HeldRequests

AHEAD = 2
"""Requests whose images the thread has: one more than it works on, so that it never waits."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is held; ``look_up`` returns those of its images with tokens that miss."""

    request_id: RequestId
    look_up: Callable[[], Sequence[ServedImage]]
    missing: dict[bytes, ServedImage] = field(default_factory=dict)


class ImageEncoder:
    """Encodes the images of requests before they are admitted; called between steps."""

    def __init__(self, store: ImageStore) -> None:
        self.held: HeldRequests = set()  # requests that wait for their images
        self._store = store
        self._new: list[_Waiting] = []
        self._queues: OrderedDict[bytes, deque[_Waiting]] = OrderedDict()  # by tenant
        self._begun: dict[RequestId, _Waiting] = {}
        self._thread = _EncoderThread(store.vision.encode)

    def begin(
        self, request: Request, images: Sequence[ServedImage], num_cached_tokens: Callable[[], int]
    ) -> tuple[ServedImage, ...]:
        """Hold a request that was just added; return its images, with equal content shared."""
        stored = self._store.add(images)

        def look_up() -> list[ServedImage]:
            hit, spans = num_cached_tokens(), request.images
            return [image for image, span in zip(stored, spans, strict=True) if span.end > hit]

        self._new.append(_Waiting(request.request_id, look_up))
        self.held.add(request.request_id)
        return stored

    def begin_step(self, loading: HeldRequests, num_running: int) -> dict[RequestId, str]:
        """Store encoded images, and give the thread more to do.

        Args:
            loading: Requests that are looked up later, once their prefix is loaded.
            num_running: Sequences whose steps run meanwhile.

        Returns:
            Requests that cannot be served, and why; they are held until ``end``.
        """
        num_threads = torch.get_num_threads()
        self._thread.num_threads = max(1, num_threads // 2) if num_running else num_threads
        failed = self._take_outputs()
        self._look_up_new(loading)
        while self._queues and len(self._begun) < AHEAD and self._has_room():
            self._begin_next()
        return failed

    def end(self, request_id: RequestId) -> None:
        """Remove a request, with the images and outputs that only it needs."""
        self._store.unpin(request_id)
        if request_id not in self.held:
            return
        self.held.discard(request_id)
        self._begun.pop(request_id, None)
        self._new = [one for one in self._new if one.request_id != request_id]
        for tenant, queue in list(self._queues.items()):
            self._enqueue(tenant, [one for one in queue if one.request_id != request_id])
        self._thread.keep(self._needed_digests())

    def wait(self, seconds: float) -> None:
        """Wait until an image is encoded, while there is nothing else to do."""
        if self._begun:
            self._thread.wait_for(lambda: bool(self._thread.done), seconds)

    def remove_outputs(self, tenant: bytes | None) -> None:
        """Remove the outputs of a tenant's images; with None all, after new weights."""
        if tenant is None:
            self._start_over()
        digests = self._needed_digests()
        self._thread.wait_for(lambda: self._thread.now is None or self._thread.now in digests)
        self._thread.drop_done(digests)
        self._store.erase(tenant)

    def _start_over(self) -> None:
        """Encode all waiting images again, with weights that were just replaced."""
        self._thread.keep(())
        self._thread.wait_for(lambda: self._thread.now is None)
        self._thread.drop_done(())
        for one in self._begun.values():
            self._thread.add(one.missing.values())

    def stop(self) -> None:
        """Let the thread end."""
        self._thread.keep(())

    def _take_outputs(self) -> dict[RequestId, str]:
        """Store encoded images, and release the requests that miss none any more."""
        failed: dict[RequestId, str] = {}
        for image, outcome in self._thread.take():
            waiting = [one for one in self._begun.values() if image.digest in one.missing]
            if waiting and isinstance(outcome, Tensor):
                self._store.put(image, outcome)
            for one in waiting:
                if isinstance(outcome, Exception):
                    error = f"{type(outcome).__name__}: {outcome}"
                    failed[one.request_id] = f"an image cannot be encoded: {error}"
                    continue
                del one.missing[image.digest]
                if not one.missing:
                    del self._begun[one.request_id]
                    self.held.discard(one.request_id)
        return failed

    def _look_up_new(self, loading: HeldRequests) -> None:
        """Look up the images of new requests, and release those that miss none."""
        new, self._new = self._new, []
        for one in new:
            if one.request_id in loading:
                self._new.append(one)
                continue
            images = one.look_up()
            self._store.pin(one.request_id, images)
            one.missing = {i.digest: i for i in images if not self._store.has(i.digest)}
            if one.missing:
                self._enqueue(images[0].tenant, [*self._queues.get(images[0].tenant, ()), one])
            else:
                self.held.discard(one.request_id)

    def _begin_next(self) -> None:
        """Give the thread the images of the first request of the tenant whose turn it is."""
        tenant, queue = self._queues.popitem(last=False)
        one = queue.popleft()
        self._enqueue(tenant, queue)
        has = self._store.has  # some may have been encoded for another request
        one.missing = {digest: i for digest, i in one.missing.items() if not has(digest)}
        if not one.missing:
            self.held.discard(one.request_id)
            return
        digests = self._needed_digests()
        self._begun[one.request_id] = one
        self._thread.add(image for digest, image in one.missing.items() if digest not in digests)

    def _enqueue(self, tenant: bytes, waiting: Iterable[_Waiting]) -> None:
        self._queues[tenant] = deque(waiting)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def _has_room(self) -> bool:
        num_bytes = self._store.num_pinned_bytes
        return not num_bytes or num_bytes < self._store.max_bytes

    def _needed_digests(self) -> set[bytes]:
        return {digest for one in self._begun.values() for digest in one.missing}


class _EncoderThread:
    """Encodes images one after the other; the thread ends when none is left.

    OpenMP keeps workers for each live thread that has computed; they would slow steps down.
    """

    def __init__(self, encode: Callable[[Pixels], Tensor]) -> None:
        self.num_threads = 1  # that the encoder may compute with
        self.done: list[tuple[ServedImage, Tensor | Exception]] = []  # with vectors or the error
        self.now: bytes | None = None  # digest of the image that is being encoded
        self._encode, self._change = encode, threading.Condition()
        self._todo: deque[ServedImage] = deque()
        self._is_alive = False

    def add(self, images: Iterable[ServedImage]) -> None:
        """Queue images."""
        with self._change:
            self._todo.extend(images)
            if self._todo and not self._is_alive:
                self._is_alive = True
                threading.Thread(target=self._work, name="image-encoder", daemon=True).start()

    def keep(self, digests: Collection[bytes]) -> None:
        """Remove queued images, except for these."""
        with self._change:
            self._todo = deque(image for image in self._todo if image.digest in digests)

    def take(self) -> list[tuple[ServedImage, Tensor | Exception]]:
        """Return what was encoded since the last call."""
        with self._change:
            done, self.done = self.done, []
        return done

    def drop_done(self, digests: Collection[bytes]) -> None:
        """Remove encoded images, except for these."""
        with self._change:
            self.done = [one for one in self.done if one[0].digest in digests]

    def wait_for(self, is_so: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait for a condition that encoded images may change."""
        with self._change:
            self._change.wait_for(is_so, seconds)

    def _work(self) -> None:
        while True:
            with self._change:
                self._is_alive = bool(self._todo)
                if not self._todo:
                    return
                image = self._todo.popleft()
                self.now = image.digest
            torch.set_num_threads(self.num_threads)  # of this thread
            try:
                outcome: Tensor | Exception = self._encode(image.pixels)
            except Exception as error:  # ends the requests of this image alone
                outcome = error
            with self._change:
                self.done.append((image, outcome))
                self.now = None
                self._change.notify_all()
            del image, outcome

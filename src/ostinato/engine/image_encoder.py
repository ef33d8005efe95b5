"""Runs the encoder of images in a thread of its own, so that no step waits for it.

A request whose images miss is held back until they are encoded; the steps of others go on::

    add ──► held ──► looked up ──► thread: one image after the other ──► released ──► planned
                         └─ all images hit, or their outputs are kept: released at once

Rules:

1. What hits is neither resized nor encoded. An image is encoded once for all that wait for it.
2. Tenants take turns, and at most ``AHEAD`` requests are with the thread. While outputs that wait
   for the steps of their requests fill the budget of the store, no more requests are begun.
3. A request that ends takes its images with it; the output of one that is being encoded is dropped.
4. An image that cannot be encoded ends the requests that wait for it, and no others.
5. A step that misses an output all the same, such as after a preemption, makes it by itself.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ostinato.core.ids import RequestId
from ostinato.core.request import Request
from ostinato.runner.image_store import ImageStore, ServedImage
from ostinato.runner.vision import Pixels
from ostinato.scheduling.held_requests import HeldRequests

AHEAD = 2
"""Requests whose images are with the thread: one more than it works on, so that it never waits."""

LookUp = Callable[[], Sequence[ServedImage]]
"""Returns those of a request's images that have tokens which miss."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is held back."""

    request_id: RequestId
    look_up: LookUp
    missing: dict[bytes, ServedImage] = field(default_factory=dict)


class ImageEncoder:
    """Encodes the images of requests before they are admitted; called between steps.

    Attributes:
        held: Requests that wait for their images.
    """

    def __init__(self, store: ImageStore) -> None:
        """Fill a store with outputs."""
        self.held: HeldRequests = set()
        self._store = store
        self._new: list[_Waiting] = []
        self._queues: OrderedDict[bytes, deque[_Waiting]] = OrderedDict()  # by tenant
        self._begun: dict[RequestId, _Waiting] = {}
        self._thread = _EncoderThread(store.vision.encode)

    def begin(
        self, request: Request, images: Sequence[ServedImage], num_cached_tokens: Callable[[], int]
    ) -> tuple[ServedImage, ...]:
        """Hold a request back that was just added; return its images, each content once for all."""
        stored = self._store.add(images)

        def look_up() -> list[ServedImage]:
            hit, spans = num_cached_tokens(), request.images
            return [image for image, span in zip(stored, spans, strict=True) if span.end > hit]

        self._new.append(_Waiting(request.request_id, look_up))
        self.held.add(request.request_id)
        return stored

    def begin_step(self, loading: HeldRequests, num_running: int) -> dict[RequestId, str]:
        """Take what was encoded, and give the thread more to do.

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
        """Drop what is left to do for a request, and what was kept for it."""
        self._store.unpin(request_id)
        if request_id not in self.held:
            return
        self.held.discard(request_id)
        self._begun.pop(request_id, None)
        self._new = [one for one in self._new if one.request_id != request_id]
        for tenant, queue in list(self._queues.items()):
            self._enqueue(tenant, [one for one in queue if one.request_id != request_id])
        self._thread.keep(self._wanted())

    def wait(self, seconds: float) -> None:
        """Wait until an image is encoded, while there is nothing else to do."""
        if self._begun:
            self._thread.wait_for(lambda: bool(self._thread.done), seconds)

    def remove_outputs(self, tenant: bytes | None) -> None:
        """Remove the outputs of a tenant's images; with None all, after new weights."""
        if tenant is None:
            self._start_over()
        wanted = self._wanted()
        self._thread.wait_for(lambda: self._thread.now is None or self._thread.now in wanted)
        self._thread.drop_done(wanted)
        self._store.forget(tenant)

    def _start_over(self) -> None:
        """Encode everything anew that waits, with weights that were just replaced."""
        self._thread.keep(())
        self._thread.wait_for(lambda: self._thread.now is None)
        self._thread.drop_done(())
        for one in self._begun.values():
            self._thread.add(one.missing.values())

    def stop(self) -> None:
        """Let the thread end."""
        self._thread.keep(())

    def _take_outputs(self) -> dict[RequestId, str]:
        """Store what was encoded, and release the requests that miss nothing any more."""
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
        """Find out what new requests miss, and release those that miss nothing."""
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
        has = self._store.has  # another request may have brought some meanwhile
        one.missing = {digest: i for digest, i in one.missing.items() if not has(digest)}
        if not one.missing:
            self.held.discard(one.request_id)
            return
        wanted = self._wanted()
        self._begun[one.request_id] = one
        self._thread.add(image for digest, image in one.missing.items() if digest not in wanted)

    def _enqueue(self, tenant: bytes, waiting: Iterable[_Waiting]) -> None:
        self._queues[tenant] = deque(waiting)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def _has_room(self) -> bool:
        num_bytes = self._store.num_pinned_bytes
        return not num_bytes or num_bytes < self._store.max_bytes

    def _wanted(self) -> set[bytes]:
        return {digest for one in self._begun.values() for digest in one.missing}


class _EncoderThread:
    """Encodes images one after the other; the thread ends when none is left.

    OpenMP keeps workers for each thread that has computed and lives; they would slow steps down.

    Attributes:
        num_threads: How many the encoder may compute with.
        done: Images with their vectors, or with what went wrong.
        now: Digest of the image that is being encoded.
    """

    def __init__(self, encode: Callable[[Pixels], Tensor]) -> None:
        """Start no thread yet."""
        self.num_threads = 1
        self.done: list[tuple[ServedImage, Tensor | Exception]] = []
        self.now: bytes | None = None
        self._encode, self._change = encode, threading.Condition()
        self._todo: deque[ServedImage] = deque()
        self._is_alive = False

    def add(self, images: Iterable[ServedImage]) -> None:
        """Encode images after those that are to be encoded already."""
        with self._change:
            self._todo.extend(images)
            if self._todo and not self._is_alive:
                self._is_alive = True
                threading.Thread(target=self._work, name="image-encoder", daemon=True).start()

    def keep(self, wanted: Collection[bytes]) -> None:
        """Leave images out that have not been begun, except for these."""
        with self._change:
            self._todo = deque(image for image in self._todo if image.digest in wanted)

    def take(self) -> list[tuple[ServedImage, Tensor | Exception]]:
        """Return what was encoded since the last call."""
        with self._change:
            done, self.done = self.done, []
        return done

    def drop_done(self, wanted: Collection[bytes]) -> None:
        """Drop what was encoded, except for these."""
        with self._change:
            self.done = [one for one in self.done if one[0].digest in wanted]

    def wait_for(self, is_so: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until something is so after an image was encoded."""
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
            outcome = self._outcome(image)
            with self._change:
                self.done.append((image, outcome))
                self.now = None
                self._change.notify_all()
            del image, outcome

    def _outcome(self, image: ServedImage) -> Tensor | Exception:
        try:
            return self._encode(image.pixels)
        except Exception as error:  # what an encoder raises is for its requests alone
            return error

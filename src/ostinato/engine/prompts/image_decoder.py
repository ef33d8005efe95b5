"""Decodes the images of conversations in worker processes, in turns by tenant.

A file of a hundred kilobytes can take a decoder a minute, and its memory many times its pixels. In
a process of its own it is stopped by limits of processor time and memory, and other tenants wait
for one image at most.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ostinato.core.errors import RequestError
from ostinato.engine.prompts.image_worker import ANSWER, CPU_LIMIT_S, DECODE, MEASURE, OK, QUESTION
from ostinato.engine.requests.tenant_queue import TenantQueue
from ostinato.engine.worker_process import ProcessPool
from ostinato.images.picture import Picture, as_picture, measure

WORKER = (sys.executable, "-m", "ostinato.engine.prompts.image_worker")
NUM_WORKERS = 2
"""Images that are decoded at once."""


class ImageReader(Protocol):
    """Reads images outside of the event loop; ``number`` is an image's in its conversation."""

    async def measure(self, file: bytes, number: int) -> tuple[int, int]:
        """Return an image's width and height, from the head of its file."""

    async def decode(self, image: Any, number: int) -> Picture:
        """Decode an image: a file's bytes, or an object that ``as_picture`` takes."""


class LocalImages:
    """Reads images in threads of this process, for a caller who is trusted."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels

    async def measure(self, file: bytes, number: int) -> tuple[int, int]:
        """Return an image's width and height, from the head of its file."""
        return await asyncio.to_thread(measure, file, self._max_pixels, f"image {number}")

    async def decode(self, image: Any, number: int) -> Picture:
        """Decode an image of any kind."""
        return await asyncio.to_thread(as_picture, image, self._max_pixels, f"image {number}")


class ImageDecoder:
    """Worker processes that read images."""

    def __init__(self, max_pixels: int, command: Sequence[str] = WORKER) -> None:
        self._max_pixels = max_pixels
        self._workers = ProcessPool((*command, str(max_pixels)), NUM_WORKERS)
        self._queue = TenantQueue("images", NUM_WORKERS)

    def of_tenant(self, cache_salt: str) -> ImageReader:
        """Return a reader that takes the turns of one tenant."""
        return _TenantImages(self, lambda work: self._queue.run(cache_salt, work))

    def measure(self, file: bytes, number: int) -> tuple[int, int]:
        """Return an image's width and height; waits for a free worker."""
        _, height, width = ANSWER.unpack_from(self._ask(MEASURE, file, number))
        return width, height

    def decode(self, image: Any, number: int) -> Picture:
        """Decode an image; waits for a free worker, where it is a file."""
        if not isinstance(image, bytes):
            return as_picture(image, self._max_pixels, f"image {number}")
        answer = self._ask(DECODE, image, number)
        _, height, width = ANSWER.unpack_from(answer)
        pixels = np.frombuffer(answer, dtype=np.uint8, offset=ANSWER.size)
        picture = Picture(pixels.reshape(height, width, 3))
        assert picture.digest, "computed here, off the event loop"
        return picture

    def _ask(self, kind: int, file: bytes, number: int) -> bytearray:
        answer = self._workers.ask(QUESTION.pack(kind, number) + file)
        if answer is None:
            raise RequestError(
                f"image {number} takes more than {CPU_LIMIT_S:g} s of processor time, or more "
                f"memory than max_image_pixels={self._max_pixels} need, to decode: send a simpler "
                "file"
            )
        if answer[0] != OK:
            raise RequestError(answer[ANSWER.size :].decode())
        return answer


class _TenantImages:
    """Reads the images of one tenant, one after the other."""

    def __init__(self, decoder: ImageDecoder, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._decoder, self._run = decoder, run

    async def measure(self, file: bytes, number: int) -> tuple[int, int]:
        size: tuple[int, int] = await self._run(lambda: self._decoder.measure(file, number))
        return size

    async def decode(self, image: Any, number: int) -> Picture:
        picture: Picture = await self._run(lambda: self._decoder.decode(image, number))
        return picture

"""Loads the images of a prompt, and places them among its tokens.

A text has one placeholder token per image; the prompt has as many of them as the image has
vectors::

    text       Look:  <image>                        What is it?
    tokens     Look:  <image> <image> ... <image>    What is it?
                      └─ ImageSpan(digest, start, length)
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np

from ostinato.core.errors import PromptTooLong, RequestError
from ostinato.core.identity import ImageSpan
from ostinato.core.tokens import pack_tokens
from ostinato.engine.prompts.image_decoder import ImageReader, LocalImages
from ostinato.images.media import MediaLimits, fetch
from ostinato.images.parts import Message, images_in, without_sources
from ostinato.images.picture import Picture, as_picture
from ostinato.runner.images.store import ServedImage
from ostinato.runner.images.vision import Vision
from ostinato.runner.loaded_model import LoadedModel

MAX_FILES = 4
"""Files of the largest size that the images of one conversation may be together."""


class ImagePrompts:
    """Loads the images of prompts and lays them out; safe in any thread."""

    def __init__(self, loaded: LoadedModel, limits: MediaLimits, max_images: int) -> None:
        """Accept at most ``max_images`` images per prompt, within ``limits``."""
        self._loaded, self._limits, self._max_images = loaded, limits, max_images

    async def load(
        self, messages: Sequence[Message], reader: ImageReader, max_tokens: int | None = None
    ) -> tuple[Sequence[Any], tuple[Picture, ...]]:
        """Fetch the images of a conversation, and decode them one after the other.

        Args:
            messages: In order, with at least one image.
            reader: Reads images outside of the event loop.
            max_tokens: Images with more tokens are refused.

        Returns:
            The conversation as chat templates read it, and its images in order.

        Raises:
            RequestError: The model takes none or not as many, or one cannot be loaded. Sizes are
                checked before anything is decoded.
        """
        sources = images_in(messages)
        vision = self._vision_for(len(sources))
        images = await self._fetch_all(sources)
        files = [pair for pair in enumerate(images, 1) if isinstance(pair[1], bytes)]
        sizes = [await reader.measure(file, number) for number, file in files]
        self._check_sizes(sizes, vision, max_tokens)
        files.clear()
        images.reverse()  # each file is freed when it is decoded
        pictures = [await reader.decode(images.pop(), n) for n in range(1, len(sources) + 1)]
        return without_sources(messages), tuple(pictures)

    async def _fetch_all(self, sources: Sequence[Any]) -> list[Any]:
        images, num_bytes, limits = list[Any](), 0, self._limits
        for source in sources:
            images.append(await fetch(source, limits) if isinstance(source, str) else source)
            num_bytes += len(images[-1]) if isinstance(source, str) else 0
            if num_bytes > MAX_FILES * limits.max_image_bytes:
                raise RequestError(
                    f"the images have {num_bytes} bytes or more: at most {MAX_FILES} times "
                    f"max_image_bytes={limits.max_image_bytes} of one conversation are read; send "
                    "smaller ones"
                )
        return images

    def _check_sizes(
        self, sizes: Sequence[tuple[int, int]], vision: Vision, max_tokens: int | None
    ) -> None:
        """Refuse images that together have too many pixels or tokens."""
        num_pixels = sum(width * height for width, height in sizes)
        if num_pixels > self._limits.max_prompt_pixels:
            raise RequestError(
                f"the images have {num_pixels} pixels or more: at most max_prompt_pixels="
                f"{self._limits.max_prompt_pixels} of one conversation are decoded; send smaller "
                "ones"
            )
        # A file may say that it is turned by a quarter.
        num_tokens = sum(
            min(vision.grid(*size).num_tokens, vision.grid(*size[::-1]).num_tokens)
            for size in sizes
        )
        if max_tokens is not None and num_tokens > max_tokens:
            raise PromptTooLong(
                f"the images have {num_tokens} tokens or more, and max_model_len={max_tokens}: "
                "send fewer or smaller ones, or raise max_model_len as far as the model goes"
            )

    def load_now(self, messages: Sequence[Message]) -> tuple[Sequence[Any], tuple[Picture, ...]]:
        """Load images as ``load``, without an event loop."""
        if not images_in(messages):
            return messages, ()
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop of its own
            reader = LocalImages(self._limits.max_image_pixels)
            return thread.submit(asyncio.run, self.load(messages, reader)).result()

    def spelled(self, text: str, images: Sequence[Any]) -> str:
        """Return a prompt's text with one placeholder token for each image."""
        return self._vision_for(len(images)).spelled(text)

    def num_tokens(self, images: Sequence[Picture], tokens: "array[int]") -> int:
        """Return how many tokens the beginning of a prompt with images has with all placeholders.

        ``tokens`` have one placeholder per image.
        """
        if not images or (vision := self._loaded.vision) is None:
            return len(tokens)
        begun = images[: tokens.count(vision.placeholder_id)]
        return len(tokens) + sum(vision.grid(p.height, p.width).num_tokens - 1 for p in begun)

    def place(
        self, images: Sequence[Any], tokens: "array[int]", tenant: bytes
    ) -> tuple["array[int]", tuple[ServedImage, ...], tuple[ImageSpan, ...]]:
        """Return a prompt's tokens with as many placeholders as its images have vectors.

        Args:
            images: Of any kind that ``as_picture`` takes.
            tokens: With one placeholder per image, or with all of them.
            tenant: Salt of the prompt.

        Returns:
            The tokens, the images, and where they are.

        Raises:
            RequestError: The model takes none or not as many, one is broken, or there are more
                or fewer places for them.
        """
        vision = self._vision_for(len(images))
        max_pixels = self._limits.max_image_pixels
        decoded = [as_picture(image, max_pixels, f"image {n}") for n, image in enumerate(images, 1)]
        served = tuple(ServedImage.of(p.pixels, p.digest, vision, tenant) for p in decoded)
        written = [vision.tokens(image.grid) for image in served]
        ids = np.frombuffer(tokens, dtype=np.uint32)
        places = np.flatnonzero(ids == vision.placeholder_id)
        is_whole = len(places) != len(images)
        pieces: list[Any] = []
        spans: list[ImageSpan] = []
        end = length = 0  # how far ids and tokens are placed
        for image, row in zip(served, written, strict=True):
            start = next(iter(places[places >= end].tolist()), len(ids))
            taken = ids[start : start + (len(row) if is_whole else 1)]
            if is_whole and not np.array_equal(taken, row):
                break
            length += start - end
            spans.append(ImageSpan(image.digest, length, len(row)))
            pieces += [ids[end:start], row]
            end, length = start + len(taken), length + len(row)
        if len(spans) < len(images) or np.any(places >= end):
            raise self._misplaced(vision, len(images), len(places))
        return pack_tokens(np.concatenate((*pieces, ids[end:]))), served, tuple(spans)

    def _vision_for(self, num_images: int) -> Vision:
        """Return the model's encoder, if it takes this number of images."""
        loaded = self._loaded
        if loaded.vision is None:
            raise RequestError(
                f"the prompt has images, and the model serves text alone: {loaded.why_no_images}; "
                "leave them out"
            )
        if num_images > self._max_images:
            raise RequestError(
                f"the prompt has {num_images} images: at most limit_mm_per_prompt="
                f"{{'image': {self._max_images}}} are taken; send fewer, or raise it"
            )
        return loaded.vision

    def _misplaced(self, vision: Vision, num_images: int, num_places: int) -> RequestError:
        tokenizer, token = self._loaded.tokenizer, f"token {vision.placeholder_id}"
        if tokenizer is not None:
            token = repr(tokenizer.convert_ids_to_tokens(vision.placeholder_id))
        return RequestError(
            f"the prompt has {num_images} images and {num_places} places for them: write {token} "
            "once for each image where it belongs, or use a chat template that does"
        )


def decode_prompt(
    ids: Sequence[int], decode: Callable[[list[int]], str], vision: Vision | None
) -> str:
    """Return the text of ids, in which an image is one piece, however many tokens it has."""
    if vision is None or vision.placeholder_id not in ids:
        return decode(list(ids))
    texts = []
    for is_image, run in groupby(ids, vision.token_ids.__contains__):
        tokens = list(run)
        shown = f"[image: {len(tokens)} token{'s' * (len(tokens) > 1)}]"
        texts.append(shown if is_image else decode(tokens))
    return "".join(texts)

"""Decodes images, and names them by their content."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from ostinato.core.errors import RequestError

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Formats that are decoded; the decoders of others are less tested against malicious files."""

MAX_RATIO = 100
"""Times that an image may be longer than wide: models scale the shorter side to a fixed length."""

MAX_SCANS = 100
"""Scans of a JPEG, each of which passes over all pixels; progressive files have about ten."""

_BEGIN_OF_SCAN = b"\xff\xda"


@dataclass(frozen=True)
class Picture:
    """An image as the model's processor takes it."""

    pixels: npt.NDArray[np.uint8]  # RGB, shape (height, width, 3); never written to

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """Columns of pixels."""
        return int(self.pixels.shape[1])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of size and pixels; files that decode to the same pixels have the same digest."""
        content = hashlib.sha256()
        for side in (self.height, self.width):
            content.update(side.to_bytes(8, "little"))
        content.update(np.ascontiguousarray(self.pixels).data)
        return content.digest()


def measure(encoded: bytes, max_pixels: int, name: str = "the image") -> tuple[int, int]:
    """Return the width and height of a file in one of ``FORMATS``, from its head.

    Raises:
        RequestError: As of ``decode``.
    """
    with _opened(encoded, name) as image:
        _check_size(image.width, image.height, max_pixels, name)
        return image.width, image.height


def decode(encoded: bytes, max_pixels: int, name: str = "the image") -> Picture:
    """Decode a file in one of ``FORMATS``; of an animation, the first frame.

    Raises:
        RequestError: It is not an image, is broken, or has too many pixels or scans, which is
            checked before anything is decoded; ``name`` is what the error calls it.
    """
    with _opened(encoded, name) as image:
        return _converted(image, max_pixels, name)


@contextmanager
def _opened(encoded: bytes, name: str) -> Iterator[Image.Image]:
    """Read the head of a file, and raise what decoders raise about it as a ``RequestError``."""
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            if image.format == "JPEG" and (num_scans := encoded.count(_BEGIN_OF_SCAN)) > MAX_SCANS:
                raise RequestError(
                    f"{name} has {num_scans} scans: at most {MAX_SCANS} are decoded; save it again"
                )
            yield image
    except RequestError:
        raise
    except Exception as error:  # decoders raise all kinds of errors about broken files
        reason = f"{type(error).__name__}: {error!s:.120}"
        if isinstance(error, UnidentifiedImageError):  # its text is the address of an object
            reason = "it does not begin as image files do"
        raise RequestError(
            f"{name} cannot be decoded ({reason}): it must be a whole file in one of the formats "
            f"{', '.join(FORMATS)}"
        ) from error


def as_picture(image: Any, max_pixels: int, name: str = "the image") -> Picture:
    """Return an image of any kind that Python callers have.

    Args:
        image: A ``PIL.Image``, an array of shape (height, width, 3) of uint8, an encoded file's
            bytes, or a ``Picture``.
        max_pixels: More are refused.
        name: What an error calls it.

    Raises:
        RequestError: It is none of them, is broken, or has too many pixels.
    """
    if isinstance(image, Picture):
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        return decode(bytes(image), max_pixels, name)
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise RequestError(
                f"{name} is an array of shape {image.shape} and {image.dtype}: it must be RGB, "
                "shape (height, width, 3), uint8"
            )
        _check_size(image.shape[1], image.shape[0], max_pixels, name)
        return Picture(image.copy())
    if not isinstance(image, Image.Image):
        raise RequestError(
            f"{name} is a {type(image).__name__}: give a PIL.Image, a uint8 array of shape "
            "(height, width, 3), or an image file's bytes"
        )
    try:
        return _converted(image, max_pixels, name)
    except OSError as error:
        raise RequestError(f"{name} cannot be decoded: {error}") from error


def _converted(image: Image.Image, max_pixels: int, name: str) -> Picture:
    """Decode the pixels, turned upright as the file says."""
    _check_size(image.width, image.height, max_pixels, name)
    upright = ImageOps.exif_transpose(image) or image
    if upright.mode.startswith("I"):  # gray of 16 bits, which Pillow would cut off at 255
        levels = np.asarray(upright).astype(np.int64) >> 8
        upright = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    return Picture(np.asarray(upright.convert("RGB")))


def _check_size(width: int, height: int, max_pixels: int, name: str) -> None:
    if width * height > max_pixels:
        raise RequestError(
            f"{name} has {width} x {height} = {width * height} pixels: at most "
            f"max_image_pixels={max_pixels} are decoded; send a smaller one"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(
            f"{name} has {width} x {height} pixels: it may be at most {MAX_RATIO} times as long as "
            "wide; cut it into several"
        )

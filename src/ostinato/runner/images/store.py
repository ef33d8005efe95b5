"""The images of live requests, and cached encoder outputs.

Requests own their images; the store finds them by the digest in their key. If all tokens of an
image hit, it is never looked up, and neither resized nor encoded::

    request ──► ServedImage ◄┄┄ weak, by digest ┄┄ ImageStore ──► outputs, by digest, LRU in bytes
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ostinato.core.identity import tenant_of
from ostinato.core.ids import RequestId
from ostinato.runner.images.vision import Pixels, Vision
from ostinato.runner.images.vision_families import ImageGrid


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ServedImage:
    """An image of a request.

    Attributes:
        digest: SHA-256 over pixels, size, the processor's settings and the tenant.
        pixels: RGB, shape (height, width, 3).
        grid: Layout of its tokens.
        tenant: Salt of the request.
    """

    digest: bytes
    pixels: Pixels
    grid: ImageGrid
    tenant: bytes

    @classmethod
    def of(cls, pixels: Pixels, content: bytes, vision: Vision, tenant: bytes) -> "ServedImage":
        """Return an image with a digest of its tenant, so that others cannot test for it.

        Args:
            pixels: RGB, shape (height, width, 3).
            content: SHA-256 over size and pixels.
            vision: The model's.
            tenant: Salt of the request.
        """
        digest = hashlib.sha256(vision.settings + content + tenant).digest()
        return cls(digest, pixels, vision.grid(*pixels.shape[:2]), tenant)


class ImageStore:
    """The images of live requests, and outputs of the encoder within a budget of bytes.

    Attributes:
        vision: The model's encoder.
        num_encoded: Number of images encoded so far.
        num_reused: Number of cached outputs used so far.
        max_bytes: Budget of the outputs.
    """

    def __init__(self, vision: Vision, max_bytes: int) -> None:
        """Start empty; the newest output is kept even if it exceeds ``max_bytes``."""
        self.vision = vision
        self.num_encoded = self.num_reused = 0
        self.max_bytes = max_bytes
        self._images: WeakValueDictionary[bytes, ServedImage] = WeakValueDictionary()
        self._outputs: OrderedDict[bytes, tuple[Tensor, bytes]] = OrderedDict()
        self._pins: dict[RequestId, set[bytes]] = {}

    def __len__(self) -> int:
        """Number of cached outputs."""
        return len(self._outputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached outputs."""
        return sum(vectors.nbytes for vectors, _ in self._outputs.values())

    def add(self, images: Iterable[ServedImage]) -> tuple[ServedImage, ...]:
        """Register a request's images; they are found as long as it holds those returned."""
        return tuple(self._images.setdefault(image.digest, image) for image in images)

    def grid(self, digest: bytes) -> ImageGrid:
        """Return the layout of a live request's image."""
        return self._images[digest].grid

    def has(self, digest: bytes) -> bool:
        """Return whether the output for an image is cached."""
        return digest in self._outputs

    def vectors(self, digest: bytes) -> Tensor:
        """Return the encoder's output for a live request's image, (num_tokens, width)."""
        if digest in self._outputs:
            self._outputs.move_to_end(digest)
            self.num_reused += 1
            return self._outputs[digest][0]
        image = self._images[digest]
        vectors = self.vision.encode(image.pixels)
        self.put(image, vectors)
        return vectors

    def put(self, image: ServedImage, vectors: Tensor) -> None:
        """Cache the encoder's output for an image."""
        self.num_encoded += 1
        self._outputs[image.digest] = vectors, image.tenant
        self._evict()

    def pin(self, request_id: RequestId, images: Iterable[ServedImage]) -> None:
        """Keep outputs of images until the request has used them."""
        self._pins[request_id] = {image.digest for image in images}

    def unpin(self, request_id: RequestId) -> None:
        """Release the pins of a request; nothing if it has none."""
        if self._pins.pop(request_id, None):
            self._evict()

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of pinned outputs."""
        pinned = set[bytes]().union(*self._pins.values())
        return sum(kept[0].nbytes for digest, kept in self._outputs.items() if digest in pinned)

    @torch.inference_mode()
    def erase(self, tenant: bytes | None = None) -> int:
        """Remove the outputs of a tenant's images, all by default; returns how many.

        Effects: overwrites them with zeros, since freed memory keeps its content.
        """
        removed = [
            digest
            for digest, (_, salt) in self._outputs.items()
            if tenant is None or tenant in (salt, tenant_of(salt))
        ]
        for digest in removed:
            self._outputs.pop(digest)[0].zero_()
        return len(removed)

    def _evict(self) -> None:
        """Evict the least recently used outputs until the rest fits; not pins and the newest."""
        if self.num_bytes <= self.max_bytes:
            return
        pinned = set[bytes]().union(*self._pins.values())
        for digest in list(self._outputs)[:-1]:
            if digest not in pinned:
                del self._outputs[digest]
                if self.num_bytes <= self.max_bytes:
                    return

"""The images of live requests, and cached encoder outputs.

Requests own their images; here they are found by the digest that is in their key. An image whose
tokens all hit is never asked for, so it is neither resized nor encoded::

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
from ostinato.runner.vision import Pixels, Vision
from ostinato.runner.vision_families import ImageGrid


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ServedImage:
    """An image of a request.

    Attributes:
        digest: SHA-256 over pixels, size, the processor's settings and the tenant.
        pixels: RGB, shape (height, width, 3).
        grid: How its tokens are laid out.
        tenant: Salt of the request.
    """

    digest: bytes
    pixels: Pixels
    grid: ImageGrid
    tenant: bytes

    @classmethod
    def of(cls, pixels: Pixels, content: bytes, vision: Vision, tenant: bytes) -> "ServedImage":
        """Name an image for one tenant, so that no other can find out whether it was seen.

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
        num_encoded: Images that went through the encoder so far.
        num_reused: Times that an output was found instead.
        max_bytes: Budget of the outputs.
    """

    def __init__(self, vision: Vision, max_bytes: int) -> None:
        """Start empty; of outputs, the newest is kept whatever ``max_bytes`` says."""
        self.vision = vision
        self.num_encoded = self.num_reused = 0
        self.max_bytes = max_bytes
        self._images: WeakValueDictionary[bytes, ServedImage] = WeakValueDictionary()
        self._outputs: OrderedDict[bytes, tuple[Tensor, bytes]] = OrderedDict()
        self._pins: dict[RequestId, set[bytes]] = {}

    def __len__(self) -> int:
        """Outputs that are kept."""
        return len(self._outputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs that are kept."""
        return sum(vectors.nbytes for vectors, _ in self._outputs.values())

    def add(self, images: Iterable[ServedImage]) -> tuple[ServedImage, ...]:
        """Note a request's images; they can be found for as long as it holds what is returned."""
        return tuple(self._images.setdefault(image.digest, image) for image in images)

    def grid(self, digest: bytes) -> ImageGrid:
        """Return how a live request's image is laid out."""
        return self._images[digest].grid

    def has(self, digest: bytes) -> bool:
        """Whether the output for an image is kept."""
        return digest in self._outputs

    def vectors(self, digest: bytes) -> Tensor:
        """Return what the encoder makes of a live request's image, (num_tokens, width)."""
        if digest in self._outputs:
            self._outputs.move_to_end(digest)
            self.num_reused += 1
            return self._outputs[digest][0]
        image = self._images[digest]
        vectors = self.vision.encode(image.pixels)
        self.put(image, vectors)
        return vectors

    def put(self, image: ServedImage, vectors: Tensor) -> None:
        """Keep what the encoder made of an image."""
        self.num_encoded += 1
        self._outputs[image.digest] = vectors, image.tenant
        self._evict()

    def pin(self, request_id: RequestId, images: Iterable[ServedImage]) -> None:
        """Keep outputs of images until a request has computed with them."""
        self._pins[request_id] = {image.digest for image in images}

    def unpin(self, request_id: RequestId) -> None:
        """Release what was kept for a request; nothing if it pinned none."""
        if self._pins.pop(request_id, None):
            self._evict()

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of outputs that wait for the steps of their requests."""
        pinned = set[bytes]().union(*self._pins.values())
        return sum(kept[0].nbytes for digest, kept in self._outputs.items() if digest in pinned)

    @torch.inference_mode()
    def forget(self, tenant: bytes | None = None) -> int:
        """Drop the outputs of a tenant's images, all by default; returns how many.

        Effects: they are overwritten, since freed memory holds what was in it.
        """
        gone = [
            digest
            for digest, (_, salt) in self._outputs.items()
            if tenant is None or tenant in (salt, tenant_of(salt))
        ]
        for digest in gone:
            self._outputs.pop(digest)[0].zero_()
        return len(gone)

    def _evict(self) -> None:
        """Drop what was used least recently until the rest fits; pins and the newest stay."""
        if self.num_bytes <= self.max_bytes:
            return
        pinned = set[bytes]().union(*self._pins.values())
        for digest in list(self._outputs)[:-1]:
            if digest not in pinned:
                del self._outputs[digest]
                if self.num_bytes <= self.max_bytes:
                    return

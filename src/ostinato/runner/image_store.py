"""The images of live requests, and what the encoder made of them.

Requests own their images; here they are found by the digest that is in their key. An image whose
tokens all hit is never asked for, so it is neither resized nor encoded::

    request ──► ServedImage ◄┄┄ weak, by digest ┄┄ ImageStore ──► outputs, by digest, LRU in bytes
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from ostinato.core.identity import tenant_of
from ostinato.runner.vision import ImageGrid, Pixels, Vision


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
    """

    def __init__(self, vision: Vision, max_bytes: int) -> None:
        """Start empty; of outputs, the newest is kept whatever ``max_bytes`` says."""
        self.vision = vision
        self.num_encoded = self.num_reused = 0
        self._max_bytes = max_bytes
        self._images: WeakValueDictionary[bytes, ServedImage] = WeakValueDictionary()
        self._outputs: OrderedDict[bytes, tuple[Tensor, bytes]] = OrderedDict()

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

    def vectors(self, digest: bytes) -> Tensor:
        """Return what the encoder makes of a live request's image, (num_tokens, width)."""
        if digest in self._outputs:
            self._outputs.move_to_end(digest)
            self.num_reused += 1
            return self._outputs[digest][0]
        image = self._images[digest]
        vectors = self.vision.encode(image.pixels)
        self.num_encoded += 1
        self._outputs[digest] = vectors, image.tenant
        while len(self._outputs) > 1 and self.num_bytes > self._max_bytes:
            self._outputs.popitem(last=False)
        return vectors

    def forget(self, tenant: bytes | None = None) -> int:
        """Drop the outputs of a tenant's images, all by default; returns how many."""
        gone = [
            digest
            for digest, (_, salt) in self._outputs.items()
            if tenant is None or tenant in (salt, tenant_of(salt))
        ]
        for digest in gone:
            del self._outputs[digest]
        return len(gone)

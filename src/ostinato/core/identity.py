"""What must be equal before KV may be shared?

Law 3: KV is reused only for the identical identity. One typed value says what that is, and
every index, tier, event and router uses it. Two parts:

* ``Identity``: what holds for a whole sequence (weights, epoch, KV format, adapter, tenant);
* ``PrefixKey``: an identity, the tokens so far, and the images among them.

A sequence may begin with a *public head*, a prefix that was published for several tenants. Its
first blocks are then those of the head's own identity, and at the *seam* behind them the
sequence's identity enters as an extra of the block, as an image does::

    blocks   0     1     2   |  3     4
             head's identity | the tenant's own
                           seam
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from ostinato.core.errors import InvalidIdentity, RequestError
from ostinato.core.ids import BlockDigest
from ostinato.core.tenancy import owner_of
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens, pack_tokens


@dataclass(frozen=True, slots=True)
class PublicHead:
    """A published prefix that a sequence begins with.

    Attributes:
        tenant: Salt of the prefix itself, in the place of a tenant's.
        num_tokens: Its length, in whole blocks.
    """

    tenant: bytes
    num_tokens: int


@dataclass(frozen=True)
class Identity:
    """What two sequences must agree on before any of their KV may be shared.

    Attributes:
        weights: Fingerprint of the model's weights, by content.
        epoch: Raised with each update of the weights.
        kv_dtype: Format of the KV store, such as ``"bfloat16"``.
        adapter: Digest of the adapter's content; empty without one.
        tenant: Salt of the tenant, and what its client narrowed it by; empty for the shared name
            space.
        head: Published prefix that the sequence begins with; None if all of it is the tenant's.
    """

    weights: bytes = b""
    epoch: int = 0
    kv_dtype: str = ""
    adapter: bytes = b""
    tenant: bytes = b""
    head: PublicHead | None = None

    def __post_init__(self) -> None:
        """Refuse what could not be hashed or compared.

        Raises:
            InvalidIdentity: A field is of the wrong type.
        """
        if (
            type(self.tenant) is bytes
            and type(self.weights) is bytes
            and type(self.adapter) is bytes
            and type(self.epoch) is int
            and self.epoch >= 0
        ):
            return
        for name in ("weights", "adapter", "tenant"):
            if type(value := getattr(self, name)) is not bytes:
                raise InvalidIdentity(f"{name}={value!r}: must be bytes; encode a text")
        raise InvalidIdentity(f"epoch={self.epoch!r}: must be an integer, at least 0")

    @cached_property
    def encoded(self) -> bytes:
        """One unambiguous byte string: each field behind its length."""
        fields = [
            self.weights,
            self.epoch.to_bytes(8, "little"),
            self.kv_dtype.encode(),
            self.adapter,
            self.tenant,
        ]
        if self.head is not None:
            fields += [self.head.tenant, self.head.num_tokens.to_bytes(8, "little")]
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    @property
    def root(self) -> "Identity":
        """The identity of a sequence's first block: its public head's, else its own."""
        return self if self.head is None else self._before_head

    @cached_property
    def _before_head(self) -> "Identity":
        assert self.head is not None
        return replace(self, tenant=self.head.tenant, head=None)

    @cached_property
    def seam(self) -> bytes:
        """What keeps tenants apart behind a public head; outsiders learn no salt from it."""
        return _SEAM + hashlib.sha256(self.encoded).digest()

    @property
    def owner(self) -> bytes:
        """Whose blocks they are: the tenant's salt without what its clients narrowed it by."""
        return owner_of(self.tenant) if self.tenant else b""

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether content of this identity is a tenant's own, or stands behind its public head."""
        is_behind = self.head is not None and self.head.tenant == tenant
        return tenant in (self.tenant, self.owner) or is_behind


_SEAM = b"\xff\xff\xff\xff"
"""No image's extra begins so: it would be the length of a digest of 4 GiB."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image's place among the tokens.

    Attributes:
        digest: Digest of the image's content.
        start: Position of its first placeholder token.
        length: Number of placeholder tokens, at least 1.
    """

    digest: bytes
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after its last placeholder token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class BlockExtra:
    """What a block's tokens do not tell: the images that touch it, and the seam before it.

    Attributes:
        encoded: The seam, if the block is the first behind a public head; then content digest,
            offset relative to the block and length of each image.
        num_text_tokens: Leading tokens that may be shared one by one: those before the first
            image token, and none behind a seam.
    """

    encoded: bytes
    num_text_tokens: int


class PrefixKey:
    """A sequence as the cache sees it: identity, tokens so far, images among them.

    Tokens are appended as they are sampled; what is there never changes. ``digests`` is a
    memo that block hashers fill: one digest per full block, by hasher.

    A packed prompt (``array("I")``) is not copied: it is the key's and the caller's until the
    first token is appended, and the caller changes nothing in it while the key is in use.
    """

    __slots__ = ("_is_shared", "_packed", "digests", "has_extras", "identity", "images", "tokens")

    def __init__(
        self, identity: Identity, tokens: Iterable[int], images: Iterable[ImageSpan] = ()
    ) -> None:
        """Take a prompt.

        Raises:
            TokenOutOfRange: An id does not fit four bytes.
            RequestError: Images overlap or lie outside the prompt.
        """
        self.identity = identity
        self._is_shared = isinstance(tokens, array) and tokens.typecode == "I"
        # A copy would cost as much as comparing it: an array is copied when it has to grow.
        self.tokens: array[int] = tokens if self._is_shared else pack_tokens(tokens)  # type: ignore[assignment]
        self.images = tuple(sorted(images, key=lambda image: image.start)) if images else ()
        self.digests: dict[object, list[BlockDigest]] = {}
        # Whether any of its blocks has an extra.
        self.has_extras = bool(self.images) or identity.head is not None
        self._packed: bytes | None = None
        if self.images:
            _check_images(self.images, len(self.tokens))

    def __len__(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add one sampled token."""
        if self._is_shared:
            self.tokens, self._is_shared = self.tokens[:], False
        self.tokens.append(token)
        self._packed = None

    def copy(self) -> "PrefixKey":
        """Return an independent key of the same content."""
        self._is_shared = True
        twin = PrefixKey(self.identity, self.tokens, self.images)
        twin.digests = {hasher: memo[:] for hasher, memo in self.digests.items()}
        return twin

    @property
    def head_tokens(self) -> int:
        """Tokens of its public head; 0 without one."""
        return 0 if self.identity.head is None else self.identity.head.num_tokens

    @property
    def packed(self) -> bytes:
        """All tokens as little-endian ``uint32``, shape (num_tokens * 4,)."""
        if self._packed is None:
            self._packed = self.tokens.tobytes()
        return self._packed

    def packed_range(self, start: int, stop: int) -> bytes:
        """Tokens ``start .. stop`` as little-endian ``uint32``."""
        if self._packed is not None:
            return self._packed[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        return self.tokens[start:stop].tobytes()

    def block_name(self, index: int, block_size: int) -> bytes:
        """Packed tokens and extras of one full block: what tells it from its siblings."""
        start, stop = index * block_size, (index + 1) * block_size
        packed = self.tokens[start:stop].tobytes()
        if self.has_extras and (extra := self.extra(start, stop)) is not None:
            return packed + extra.encoded
        return packed

    def extra(self, start: int, stop: int) -> BlockExtra | None:
        """What images and a seam add to the identity of a block of tokens ``start .. stop``."""
        head = self.identity.head
        is_seam = head is not None and start <= head.num_tokens < stop
        touching = [i for i in self.images if i.start < stop and i.end > start]
        if not touching and not is_seam:
            return None
        encoded = b"".join(
            len(image.digest).to_bytes(4, "little")
            + image.digest
            + (image.start - start).to_bytes(8, "little", signed=True)
            + image.length.to_bytes(8, "little")
            for image in touching
        )
        if is_seam:
            return BlockExtra(self.identity.seam + encoded, 0)
        return BlockExtra(encoded, max(0, touching[0].start - start))

    def blocks_with_extras(self, first: int, last: int, block_size: int) -> Iterable[int]:
        """Name the blocks among ``first .. last`` that may have an extra."""
        if self.images:
            return range(first, last)
        seam = -1 if self.identity.head is None else self.identity.head.num_tokens // block_size
        return (seam,) if first <= seam < last else ()

    def num_common_tokens(self, other: "PrefixKey") -> int:
        """Count the tokens from position 0 on whose KV the two sequences could share.

        Two images at one place are the same if digest, start and length are.
        """
        if self.identity.root != other.identity.root:
            return 0
        common = num_common_tokens(self.packed, other.packed)
        if self.identity != other.identity:  # what they share is a public head at most
            common = min(common, max(self.head_tokens, other.head_tokens))
        for mine, theirs in zip_longest(self.images, other.images):
            if mine != theirs:
                starts = [image.start for image in (mine, theirs) if image is not None]
                return min(common, *starts)
        return common

    def num_text_tokens(self, start: int, stop: int) -> int:
        """Number of tokens from ``start`` on that may be shared one by one, up to ``stop``."""
        extra = self.extra(start, stop) if self.has_extras else None
        return stop - start if extra is None else extra.num_text_tokens


def _check_images(images: tuple[ImageSpan, ...], num_tokens: int) -> None:
    """Refuse spans that overlap or leave the prompt."""
    end = 0
    for image in images:
        if image.length < 1 or image.start < end or image.end > num_tokens:
            raise RequestError(
                f"image at tokens {image.start}..{image.end} overlaps another or leaves the "
                f"prompt of {num_tokens} tokens"
            )
        end = image.end

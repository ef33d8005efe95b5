"""What must be equal before KV may be shared.

Law 3: KV is reused only for the identical identity. Two parts:

* ``Identity``: what holds for a whole sequence (weights, epoch, KV format, adapter, tenant);
* ``PrefixKey``: an identity, the tokens so far, and the images among them.

A sequence may begin with a *public prefix*, published for several tenants. Its first blocks have
the public prefix's own identity; at the *namespace boundary* after them the sequence's identity
enters as an extra of the block, as an image does::

    blocks   0     1     2            |  3     4
             public prefix's identity | the tenant's own
                                  boundary
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from ostinato.core.errors import InvalidIdentity, RequestError
from ostinato.core.ids import BlockDigest
from ostinato.core.tokens import num_common_tokens, pack_tokens

SALT_SEPARATOR = "\x1f"
"""Ends a tenant's salt where its client added one of its own (ASCII's unit separator)."""


def tenant_of(salt: bytes) -> bytes:
    """Return a tenant's salt without what its client added to it.

    Blocks, shares and counts are the tenant's: a client gets no more of them by new salts.
    """
    return salt.partition(SALT_SEPARATOR.encode())[0]


_SALT_NAME = b"salt-sha256:"


def salt_name(salt: bytes) -> str:
    """Return how KV events tell a tenant's blocks apart without its salt; a name stays as it is."""
    if salt.startswith(_SALT_NAME):
        return salt.decode()
    return (_SALT_NAME + hashlib.sha256(salt).hexdigest()[:32].encode()).decode()


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A published prefix that a sequence begins with.

    Attributes:
        tenant: Salt of the prefix itself, in place of a tenant's.
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
        tenant: Salt of the tenant, and what its client added; empty for the shared namespace.
        public_prefix: Published prefix that the sequence begins with, if any.
    """

    weights: bytes = b""
    epoch: int = 0
    kv_dtype: str = ""
    adapter: bytes = b""
    tenant: bytes = b""
    public_prefix: PublicPrefix | None = None

    def __post_init__(self) -> None:
        """Raise InvalidIdentity where a field is of the wrong type."""
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
        """One unambiguous byte string: each field after its length."""
        fields = [
            self.weights,
            self.epoch.to_bytes(8, "little"),
            self.kv_dtype.encode(),
            self.adapter,
            self.tenant,
        ]
        if (public := self.public_prefix) is not None:
            fields += [public.tenant, public.num_tokens.to_bytes(8, "little")]
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    @property
    def root(self) -> "Identity":
        """The identity of a sequence's first block: its public prefix's, else its own."""
        return self if self.public_prefix is None else self._of_public_prefix

    @cached_property
    def _of_public_prefix(self) -> "Identity":
        assert self.public_prefix is not None
        return replace(self, tenant=self.public_prefix.tenant, public_prefix=None)

    @cached_property
    def boundary(self) -> bytes:
        """Keeps tenants apart after a public prefix, without telling their salts."""
        return _BOUNDARY + hashlib.sha256(self.encoded).digest()

    @property
    def owner(self) -> bytes:
        """The tenant's salt, without what its client added."""
        return tenant_of(self.tenant) if self.tenant else b""

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether content of this identity is a tenant's own, or continues its public prefix."""
        continues = self.public_prefix is not None and self.public_prefix.tenant == tenant
        return tenant in (self.tenant, self.owner) or continues


_BOUNDARY = b"\xff\xff\xff\xff"
"""No image's extra begins with it: it would be the length of a digest of 4 GiB."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image by the digest of its content, and its placeholder tokens, at least one."""

    digest: bytes
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after its last placeholder token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class BlockExtra:
    """Part of a block's identity besides its tokens: images, and a boundary before it.

    Attributes:
        encoded: The boundary, if the block is the first after a public prefix; then content
            digest, offset relative to the block and length of each image.
        num_text_tokens: Leading tokens that may be shared one by one: those before the first
            image token, and none after a boundary.
    """

    encoded: bytes
    num_text_tokens: int


class PrefixKey:
    """A sequence as the cache sees it: identity, tokens so far, images among them.

    Tokens are only appended. Block hashers keep their digests in ``digests``: one per full
    block, by hasher. A packed prompt (``array("I")``) is not copied before the first token is
    appended; its caller does not change it while the key is in use.
    """

    __slots__ = ("_is_shared", "digests", "has_extras", "identity", "images", "tokens")

    def __init__(
        self, identity: Identity, tokens: Iterable[int], images: Iterable[ImageSpan] = ()
    ) -> None:
        """Pack a prompt.

        Raises:
            TokenOutOfRange: An id does not fit four bytes.
            RequestError: Images overlap or leave the prompt.
        """
        self.identity = identity
        self._is_shared = isinstance(tokens, array) and tokens.typecode == "I"
        # A copy would cost as much as comparing it: an array is copied when it has to grow.
        self.tokens: array[int] = tokens if self._is_shared else pack_tokens(tokens)  # type: ignore[assignment]
        self.images = tuple(sorted(images, key=lambda image: image.start)) if images else ()
        self.digests: dict[object, list[BlockDigest]] = {}
        # Whether any of its blocks has an extra.
        self.has_extras = bool(self.images) or identity.public_prefix is not None
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

    def copy(self) -> "PrefixKey":
        """Return an independent key of the same content."""
        self._is_shared = True
        twin = PrefixKey(self.identity, self.tokens, self.images)
        twin.digests = {hasher: memo[:] for hasher, memo in self.digests.items()}
        return twin

    @property
    def public_tokens(self) -> int:
        """Tokens of its public prefix; 0 without one."""
        public = self.identity.public_prefix
        return 0 if public is None else public.num_tokens

    @property
    def packed(self) -> bytes:
        """All tokens as little-endian ``uint32``, shape (num_tokens * 4,)."""
        return self.tokens.tobytes()

    def packed_range(self, start: int, stop: int) -> bytes:
        """Tokens ``start .. stop`` as little-endian ``uint32``."""
        return self.tokens[start:stop].tobytes()

    def block_name(self, index: int, block_size: int) -> bytes:
        """Packed tokens and extras of one full block, which tell it from its siblings."""
        start, stop = index * block_size, (index + 1) * block_size
        packed = self.tokens[start:stop].tobytes()
        if self.has_extras and (extra := self.extra(start, stop)) is not None:
            return packed + extra.encoded
        return packed

    def extra(self, start: int, stop: int) -> BlockExtra | None:
        """What images and a boundary add to the identity of a block of tokens ``start .. stop``."""
        public = self.identity.public_prefix
        is_boundary = public is not None and start <= public.num_tokens < stop
        touching = [i for i in self.images if i.start < stop and i.end > start]
        if not touching and not is_boundary:
            return None
        encoded = b"".join(
            len(image.digest).to_bytes(4, "little")
            + image.digest
            + (image.start - start).to_bytes(8, "little", signed=True)
            + image.length.to_bytes(8, "little")
            for image in touching
        )
        if is_boundary:
            return BlockExtra(self.identity.boundary + encoded, 0)
        return BlockExtra(encoded, max(0, touching[0].start - start))

    def blocks_with_extras(self, first: int, last: int, block_size: int) -> Iterable[int]:
        """Name the blocks among ``first .. last`` that may have an extra."""
        if self.images:
            return range(first, last)
        public = self.identity.public_prefix
        boundary = -1 if public is None else public.num_tokens // block_size
        return (boundary,) if first <= boundary < last else ()

    def num_common_tokens(self, other: "PrefixKey") -> int:
        """Return the length of the longest prefix whose KV the two sequences could share.

        Two images at one place are the same if digest, start and length are.
        """
        if self.identity.root != other.identity.root:
            return 0
        mine, theirs = memoryview(self.tokens).cast("B"), memoryview(other.tokens).cast("B")
        common = num_common_tokens(mine, theirs)
        if self.identity != other.identity:  # they share a public prefix at most
            common = min(common, max(self.public_tokens, other.public_tokens))
        for pair in zip_longest(self.images, other.images):
            if pair[0] != pair[1]:
                return min(common, *(image.start for image in pair if image is not None))
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

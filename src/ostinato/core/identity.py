"""What must be equal before KV may be shared.

Law 3: KV is reused only where the ``PrefixKey`` is the same: identity, tokens and images so far.

A sequence may begin with a *public prefix*, published for several tenants, and an activated adapter
(aLoRA) computes from its invocation on alone. At each *boundary* the next identity enters as an
extra of the block, as an image does::

    blocks   0     1     2            |  3     4                |  5
             public prefix's identity | the tenant's base model | with the adapter
"""

import hashlib
import struct
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
    """Return a tenant's salt without what its client added to it, which gets no share more."""
    return salt.partition(SALT_SEPARATOR.encode())[0]


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A published prefix that a sequence begins with: its own salt, and its length in blocks."""

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
        adapter_start: First token that it computes, that of an activated adapter's invocation.
        tenant: Salt of the tenant, and what its client added; empty for the shared namespace.
        public_prefix: Published prefix that the sequence begins with, if any.
    """

    weights: bytes = b""
    epoch: int = 0
    kv_dtype: str = ""
    adapter: bytes = b""
    adapter_start: int = 0
    tenant: bytes = b""
    public_prefix: PublicPrefix | None = None

    def __post_init__(self) -> None:
        """Raise InvalidIdentity where a field is of the wrong type."""
        kinds = {type(self.tenant), type(self.weights), type(self.adapter)}
        if kinds == {bytes} and type(self.epoch) is int and self.epoch >= 0:
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
        if self.adapter_start:
            fields.append(self.adapter_start.to_bytes(8, "little"))
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    @property
    def stages(self) -> "tuple[tuple[int, Identity], ...]":
        """The identities of a sequence's blocks, each with the token that it begins at."""
        return self._stages if self.public_prefix or self.adapter_start else ((0, self),)

    @cached_property
    def _stages(self) -> "tuple[tuple[int, Identity], ...]":
        own = replace(self, adapter=b"", adapter_start=0) if self.adapter_start else self
        stages = [(0, own)]
        if (public := self.public_prefix) is not None:
            root = replace(own, tenant=public.tenant, public_prefix=None)
            stages = [(0, root), (public.num_tokens, own)]
        return (*stages, (self.adapter_start, self)) if self.adapter_start else tuple(stages)

    @property
    def root(self) -> "Identity":
        """The identity of a sequence's first block."""
        return self.stages[0][1]

    @cached_property
    def boundary(self) -> bytes:
        """Keeps what follows apart from other identities, without telling salts."""
        return BOUNDARY + hashlib.sha256(self.encoded).digest()

    @property
    def owner(self) -> bytes:
        """The tenant's salt, without what its client added."""
        return tenant_of(self.tenant)

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether content of this identity is a tenant's own, or continues its public prefix."""
        continues = self.public_prefix is not None and self.public_prefix.tenant == tenant
        return tenant in (self.tenant, self.owner) or continues


BOUNDARY = b"\xff\xff\xff\xff"
"""No image's extra begins with it: it would be the length of a digest of 4 GiB."""

IMAGE_PLACE = struct.Struct("<qQ")
"""Where an image begins, relative to the block, and its length, in tokens."""


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

    def encoded(self, start: int) -> bytes:
        """Return its part of the extra of a block that begins at ``start``."""
        size = len(self.digest).to_bytes(4, "little")
        return size + self.digest + IMAGE_PLACE.pack(self.start - start, self.length)


@dataclass(frozen=True, slots=True)
class BlockExtra:
    """Part of a block's identity besides its tokens: images, and a boundary before it.

    Attributes:
        encoded: The boundaries in it; then content digest, offset relative to the block and length
            of each image.
        parts: The same in token order: where in the block each begins and ends, and its bytes; a
            boundary goes on to the end of the block, whatever its size.
    """

    encoded: bytes
    parts: tuple[tuple[int, int, bytes], ...]


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
        self.has_extras = bool(self.images) or len(identity.stages) > 1  # of any block
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

    def packed_range(self, start: int, stop: int) -> bytes:
        """Tokens ``start .. stop`` as little-endian ``uint32``."""
        return self.tokens[start:stop].tobytes()

    def block_name(self, index: int, block_size: int) -> bytes:
        """Packed tokens and extras of one full block, which tell it from its siblings."""
        packed, extra = self.block_run(index * block_size, (index + 1) * block_size)
        return packed if extra is None else packed + extra.encoded

    def block_run(self, start: int, stop: int) -> tuple[bytes, BlockExtra | None]:
        """Packed tokens and extras of a block, or of its beginning."""
        extra = self.extra(start, stop) if self.has_extras else None
        return self.tokens[start:stop].tobytes(), extra

    def extra(self, start: int, stop: int) -> BlockExtra | None:
        """What images and a boundary add to the identity of a block of tokens ``start .. stop``."""
        begun = [stage for stage in self.identity.stages[1:] if start <= stage[0] < stop]
        parts = [(first - start, 2**31, identity.boundary) for first, identity in begun]
        for image in self.images:
            if image.start < stop and image.end > start:
                place = max(0, image.start - start)
                parts.append((place, image.end - start, image.encoded(start)))
        if not parts:
            return None
        return BlockExtra(b"".join(part[2] for part in parts), tuple(sorted(parts)))

    def extras(self, first: int, last: int, block_size: int) -> dict[int, BlockExtra]:
        """Return the extras of those blocks among ``first .. last`` that have one."""
        places = {start // block_size for start, _ in self.identity.stages[1:]}
        for image in self.images:
            places.update(range(image.start // block_size, (image.end - 1) // block_size + 1))
        return {
            index: extra
            for index in places
            if first <= index < last
            and (extra := self.extra(index * block_size, (index + 1) * block_size)) is not None
        }

    def identity_of(self, index: int, block_size: int) -> tuple[Identity, int]:
        """Return the identity of a block, and which block the next one begins at, if any."""
        identity = self.identity.root
        for start, stage in self.identity.stages[1:]:
            if start // block_size > index:
                return identity, start // block_size
            identity = stage
        return identity, 2**31

    def num_common_tokens(self, other: "PrefixKey") -> int:
        """Return the length of the longest prefix whose KV the two sequences could share.

        Two images at one place are the same if digest, start and length are.
        """
        mine, theirs = memoryview(self.tokens).cast("B"), memoryview(other.tokens).cast("B")
        common = num_common_tokens(mine, theirs)
        for pair in zip_longest(self._parts(), other._parts()):
            if pair[0] != pair[1]:
                return min(common, *(part[0] for part in pair if part is not None))
        return common

    def _parts(self) -> list[tuple[int, object]]:
        """List its identities and images, each with the token that it begins at."""
        images = [(image.start, image) for image in self.images]
        return sorted([*self.identity.stages, *images], key=lambda part: part[0])


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

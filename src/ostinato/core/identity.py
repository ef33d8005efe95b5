"""What must be equal before KV may be shared.

Law 3: KV is reused only where the ``PrefixKey`` is the same: identity, tokens and images so far.

A sequence may begin with a *public prefix*, published for several tenants, and an activated adapter
(aLoRA) computes only from its invocation on. At each *boundary* the next identity is part of the
extra of the block that it begins in, as an image is of each block that it touches::

    blocks   0     1     2            |  3     4                |  5
             public prefix's identity | the tenant's base model | with the adapter
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ostinato.core.errors import InvalidIdentity, RequestError
from ostinato.core.ids import BlockDigest
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens, pack_tokens

SALT_SEPARATOR = "\x1f"  # between a tenant's salt and what its client added
BOUNDARY = b"\xff\xff\xff\xff"  # begins its part of an extra; no image's digest is 4 GiB long
IMAGE_PLACE = struct.Struct("<qQ")  # where an image begins, relative to the block; its length


def tenant_of(salt: bytes) -> bytes:
    """Return the tenant's own part of a salt, without what its client added."""
    return salt.partition(SALT_SEPARATOR.encode())[0]


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A published prefix that a sequence begins with."""

    tenant: bytes  # its own salt
    num_tokens: int  # in whole blocks


@dataclass(frozen=True)
class Identity:
    """What two sequences must agree on before any of their KV may be shared."""

    weights: bytes = b""  # fingerprint of the model's weights, by content
    epoch: int = 0  # raised with each update of the weights
    kv_dtype: str = ""  # format of the KV store, such as "bfloat16"
    adapter: bytes = b""  # digest of the adapter's content; empty without one
    adapter_start: int = 0  # first token that it computes: an activated adapter's invocation
    tenant: bytes = b""  # the tenant's salt, and what its client added; empty is the shared one
    public_prefix: PublicPrefix | None = None  # that the sequence begins with, if any

    def __post_init__(self) -> None:
        """Raise InvalidIdentity where a field is of the wrong type."""
        for name in ("weights", "adapter", "tenant"):
            if type(value := getattr(self, name)) is not bytes:
                raise InvalidIdentity(f"{name}={value!r}: must be bytes; encode a text")
        if type(self.epoch) is not int or self.epoch < 0:
            raise InvalidIdentity(f"epoch={self.epoch!r}: must be an integer, at least 0")

    @cached_property
    def encoded(self) -> bytes:
        """One unambiguous byte string: each field after its length."""
        epoch, kv_dtype = self.epoch.to_bytes(8, "little"), self.kv_dtype.encode()
        fields = [self.weights, epoch, kv_dtype, self.adapter, self.tenant]
        if (public := self.public_prefix) is not None:
            fields += [public.tenant, public.num_tokens.to_bytes(8, "little")]
        if self.adapter_start:
            fields.append(self.adapter_start.to_bytes(8, "little"))
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    @cached_property
    def stages(self) -> "tuple[Stage, ...]":
        """The identities of a sequence's blocks, the root first."""
        own = replace(self, adapter=b"", adapter_start=0) if self.adapter_start else self
        stages = [Stage(0, own)]
        if (public := self.public_prefix) is not None:
            root = replace(own, tenant=public.tenant, public_prefix=None)
            stages = [Stage(0, root), Stage(public.num_tokens, own)]
        if self.adapter_start:
            stages.append(Stage(self.adapter_start, self))
        return tuple(stages)

    @property
    def root(self) -> "Identity":
        """The identity of a sequence's first block."""
        return self.stages[0].identity if self.public_prefix or self.adapter_start else self

    @property
    def boundaries(self) -> "tuple[Stage, ...]":
        """The stages after the root; most sequences have none."""
        return self.stages[1:] if self.public_prefix or self.adapter_start else ()

    @property
    def owner(self) -> bytes:
        """The tenant's own part of the salt."""
        return tenant_of(self.tenant)

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether content of this identity is a tenant's own, or continues its public prefix."""
        public = b"" if self.public_prefix is None else self.public_prefix.tenant
        return tenant in (self.tenant, self.owner) or (
            self.public_prefix is not None and tenant in (public, tenant_of(public))
        )


class Stage(NamedTuple):
    """Where an identity begins in a sequence: at a boundary, unless it is the root."""

    start: int
    identity: Identity

    @property
    def end(self) -> int:
        """Beyond any block: what follows a boundary is shared in whole blocks only."""
        return 2**31

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it begins among tokens ``start .. stop``."""
        return start <= self.start < stop

    def encoded(self, start: int) -> bytes:
        """Return its part of the extra of the block that it begins in; it reveals no salt."""
        return BOUNDARY + hashlib.sha256(self.identity.encoded).digest()


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

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of its tokens is among tokens ``start .. stop``."""
        return self.start < stop and self.end > start

    def encoded(self, start: int) -> bytes:
        """Return its part of the extra of a block that begins at ``start``."""
        size = len(self.digest).to_bytes(4, "little")
        return size + self.digest + IMAGE_PLACE.pack(self.start - start, self.length)


Spans = tuple[Stage | ImageSpan, ...]
"""Boundaries, then images, of a sequence: what tokens alone do not identify."""


def overlapping(spans: Spans, start: int, stop: int) -> Spans:
    """Return the spans that overlap tokens ``start .. stop`` of a sequence."""
    return tuple(span for span in spans if span.overlaps(start, stop))


class BlockKey(NamedTuple):
    """What identifies a block, or its beginning, among the continuations of its prefix."""

    tokens: bytes  # packed
    spans: Spans  # that overlap it
    start: int  # position of its first token

    @property
    def name(self) -> bytes:
        """Its tokens and its extra: what spans add to them, encoded."""
        return self.tokens + b"".join(span.encoded(self.start) for span in self.spans)

    @property
    def child_name(self) -> bytes:
        """Its name among its siblings; two blocks share KV as far as their names are equal.

        For that the name of a block with spans follows its tokens with part of a digest in place
        of each span's first token.
        """
        if not self.spans:
            return self.tokens
        words = bytearray(self.tokens)
        for span in self.spans:
            place = max(0, span.start - self.start) * TOKEN_BYTES
            word = slice(place, place + TOKEN_BYTES)
            words[word] = hashlib.sha256(words[word] + span.encoded(self.start)).digest()[:4]
        return bytes(words) + self.name

    def num_common_tokens(self, other: "BlockKey") -> int:
        """Count the leading tokens whose KV two blocks can share; an image is never split."""
        end = self.start + num_common_tokens(self.tokens, other.tokens)
        mine, theirs = set(self.spans), set(other.spans)
        parted = [x.start for x in mine | theirs if x.end > end or x not in mine & theirs]
        return max(0, min([end, *parted]) - self.start)


class PrefixKey:
    """A sequence as the cache sees it: identity, tokens so far, images among them.

    Tokens are only appended. A packed prompt (``array("I")``) is not copied before the first token
    is appended; its caller does not change it while the key is in use.
    """

    __slots__ = ("_is_shared", "digests", "identity", "images", "spans", "tokens")

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
        self.spans: Spans = identity.boundaries + self.images
        self.digests: dict[object, list[BlockDigest]] = {}  # of the full blocks, by block hasher
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

    def block_key(self, start: int, stop: int) -> BlockKey:
        """Return what identifies tokens ``start .. stop`` among continuations of their prefix."""
        spans = overlapping(self.spans, start, stop) if self.spans else ()
        return BlockKey(self.tokens[start:stop].tobytes(), spans, start)

    def block_name(self, index: int, block_size: int) -> bytes:
        """Packed tokens and extra of a full block: what its digest covers after its prefix."""
        start, stop = index * block_size, (index + 1) * block_size
        packed = self.tokens[start:stop].tobytes()
        return packed + self.extra(start, stop) if self.spans else packed

    def extra(self, start: int, stop: int) -> bytes:
        """What spans add to the name of a block of tokens ``start .. stop``; mostly empty."""
        return b"".join([span.encoded(start) for span in self.spans if span.overlaps(start, stop)])

    def child_name(self, start: int, stop: int) -> bytes:
        """Return the name by which an index finds a block among continuations of its prefix."""
        packed = self.tokens[start:stop].tobytes()
        return self.block_key(start, stop).child_name if self.spans else packed

    def identity_of(self, index: int, block_size: int) -> tuple[Identity, int]:
        """Return the identity of a block, and which block the next one begins at, if any."""
        identity = self.identity.root
        for start, stage in self.identity.boundaries:
            if start // block_size > index:
                return identity, start // block_size
            identity = stage
        return identity, 2**31

    def num_common_tokens(self, other: "PrefixKey") -> int:
        """Return the length of the longest prefix whose KV two sequences can share."""
        if self.identity.root != other.identity.root:
            return 0
        mine, theirs = memoryview(self.tokens).cast("B"), memoryview(other.tokens).cast("B")
        parted = {*self.spans} ^ {*other.spans}
        return min([num_common_tokens(mine, theirs), *(span.start for span in parted)])


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

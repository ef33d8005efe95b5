"""What must be equal before KV may be shared.

Law 3: KV is reused only where the ``PrefixKey`` is the same: identity, tokens and images so far.

An identity may continue another one, its *base*, from a token on: a tenant's sequence that begins
with a *public prefix*, published for several tenants, and an activated adapter (aLoRA), which
computes only from its invocation on. The block in which it begins has it in its *extra*, as each
block that an image touches has the image::

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


def derive_salt(salt: str, cache_salt: str) -> str:
    """Return the salt of a tenant's request whose client sent one of its own.

    The tenant's comes first, so that nothing a client sends reaches another tenant's; an empty
    one is the shared namespace, which clients may divide as they like.
    """
    return f"{salt}{SALT_SEPARATOR}{cache_salt}" if salt and cache_salt else salt or cache_salt


def is_salt_of(salt: str, tenant: str) -> bool:
    """Whether a salt is a tenant's, or was derived from it."""
    return salt == tenant or tenant_of(salt.encode()) == tenant.encode()


@dataclass(frozen=True)
class Identity:
    """The facts on which two sequences must agree before they share any KV.

    One with a base continues it: the tokens before ``start`` are the base's.
    """

    weights: bytes = b""  # fingerprint of the model's weights, by content
    epoch: int = 0  # raised with each update of the weights
    kv_dtype: str = ""  # format of the KV store, such as "bfloat16"
    adapter: bytes = b""  # digest of the adapter's content; empty without one
    tenant: bytes = b""  # the tenant's salt, and what its client added; empty is the shared one
    base: "Identity | None" = None  # of the tokens before its own
    start: int = 0  # its first token; 0 without a base

    def __post_init__(self) -> None:
        """Raise InvalidIdentity where a field is of the wrong type, or does not fit the base."""
        for name in ("weights", "adapter", "tenant"):
            if type(value := getattr(self, name)) is not bytes:
                raise InvalidIdentity(f"{name}={value!r}: must be bytes; encode a text")
        if type(self.kv_dtype) is not str:
            raise InvalidIdentity(f"kv_dtype={self.kv_dtype!r}: must be a str")
        if type(self.epoch) is not int or not 0 <= self.epoch < 2**63:
            raise InvalidIdentity(f"epoch={self.epoch!r}: must be an integer from 0 to 2**63 - 1")
        if self.base is not None:
            self._check_base(self.base)
        elif self.start != 0:
            raise InvalidIdentity(f"start={self.start!r}: must be 0 without a base")

    def _check_base(self, base: "Identity") -> None:
        if type(base) is not Identity:
            raise InvalidIdentity(f"base={base!r}: must be an Identity")
        minimum, start = base.start or 1, self.start
        if type(start) is not int or not minimum <= start < 2**31:
            raise InvalidIdentity(
                f"start={start!r}: must be an integer from {minimum} to 2**31 - 1"
            )
        for name in ("weights", "epoch", "kv_dtype"):
            if (value := getattr(self, name)) != (base_value := getattr(base, name)):
                raise InvalidIdentity(f"{name}={value!r}: must be that of its base, {base_value!r}")

    def renewed(self, weights: bytes, epoch: int) -> "Identity":
        """Return this identity, and all that it continues, under other weights."""
        base = None if self.base is None else self.base.renewed(weights, epoch)
        return replace(self, weights=weights, epoch=epoch, base=base)

    @cached_property
    def encoded(self) -> bytes:
        """One unambiguous byte string: each field after its length."""
        epoch, kv_dtype = self.epoch.to_bytes(8, "little"), self.kv_dtype.encode()
        fields = [self.weights, epoch, kv_dtype, self.adapter, self.tenant]
        if self.base is not None:
            fields += [self.base.encoded, self.start.to_bytes(8, "little")]
        return b"".join(len(field).to_bytes(4, "little") + field for field in fields)

    @property
    def root(self) -> "Identity":
        """The identity of a sequence's first block."""
        return self if self.base is None else self.base.root

    @property
    def stages(self) -> "tuple[Identity, ...]":
        """What it continues, the root first, and itself: each from its ``start`` on."""
        return (self,) if self.base is None else (*self.base.stages, self)

    @property
    def num_public_tokens(self) -> int:
        """Tokens of the public prefix that it continues, whose salt is the root's; mostly 0."""
        return next(stage.start for stage in self.stages if stage.tenant == self.tenant)

    @property
    def adapter_start(self) -> int:
        """First token that the adapter computes: 0, or the invocation of an activated one."""
        return next(stage.start for stage in self.stages if stage.adapter == self.adapter)

    @cached_property
    def owner(self) -> bytes:
        """The tenant's own part of the salt."""
        return tenant_of(self.tenant)

    def belongs_to(self, tenant: bytes) -> bool:
        """Whether content of this identity is a tenant's own, or continues its public prefix."""
        return any(tenant in (stage.tenant, stage.owner) for stage in self.stages)

    def of_block(self, index: int, block_size: int) -> "tuple[Identity, int]":
        """Return the identity of a block, and which block the next one begins in, if any."""
        identity, end = self, 2**31
        while identity.base is not None and identity.start // block_size > index:
            identity, end = identity.base, identity.start // block_size
        return identity, end

    @property
    def end(self) -> int:
        """Position after its first token, which stands for it among the spans."""
        return self.start + 1

    def extra(self, start: int) -> bytes:
        """Return its part of the extra of the block that it begins in; it reveals no salt."""
        return BOUNDARY + hashlib.sha256(self.encoded).digest()


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

    def extra(self, start: int) -> bytes:
        """Return its part of the extra of a block that begins at ``start``."""
        size = len(self.digest).to_bytes(4, "little")
        return size + self.digest + IMAGE_PLACE.pack(self.start - start, self.length)


Spans = tuple[Identity | ImageSpan, ...]
"""Identities after the root, then images, of a sequence: what tokens alone do not identify."""


def overlapping(spans: Spans, start: int, stop: int) -> Spans:
    """Return the spans that overlap tokens ``start .. stop`` of a sequence."""
    return tuple(span for span in spans if span.start < stop and span.end > start)


class BlockKey(NamedTuple):
    """The name of a block, or of its beginning, among the continuations of its prefix."""

    tokens: bytes  # packed
    spans: Spans  # that overlap it
    start: int  # position of its first token

    @property
    def extra(self) -> bytes:
        """What spans add to its tokens; mostly empty."""
        return b"".join([span.extra(self.start) for span in self.spans])

    @property
    def name(self) -> bytes:
        """Its tokens and its extra: what its digest covers after its prefix."""
        return self.tokens + self.extra if self.spans else self.tokens

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
            words[word] = hashlib.sha256(words[word] + span.extra(self.start)).digest()[:4]
        return bytes(words) + self.name

    def num_common_tokens(self, other: "BlockKey") -> int:
        """Count the leading tokens that may be copied from one block to the other.

        An image is never split, and what follows the start of an identity is never copied.
        """
        end = self.start + num_common_tokens(self.tokens, other.tokens)
        spans, other_spans = {*self.spans}, {*other.spans}
        whole = {x for x in spans & other_spans if isinstance(x, ImageSpan) and x.end <= end}
        return max(0, min([end, *(x.start for x in (spans | other_spans) - whole)]) - self.start)


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
            RequestError: Images overlap or leave the prompt, or an identity begins inside one.
        """
        self.identity = identity
        self._is_shared = isinstance(tokens, array) and tokens.typecode == "I"
        # A copy would cost as much as comparing it: an array is copied when it has to grow.
        self.tokens: array[int] = tokens if self._is_shared else pack_tokens(tokens)  # type: ignore[assignment]
        self.images = tuple(sorted(images, key=lambda image: image.start)) if images else ()
        later = () if identity.base is None else identity.stages[1:]
        self.spans: Spans = later + self.images
        self.digests: dict[object, list[BlockDigest]] = {}  # of the full blocks, by block hasher
        if self.images:
            _check_images(self.images, len(self.tokens), later)

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
        twin = self.with_identity(self.identity)
        twin.digests = {hasher: memo[:] for hasher, memo in self.digests.items()}
        return twin

    def with_identity(self, identity: Identity) -> "PrefixKey":
        """Return an independent key of the same tokens and images under another identity."""
        self._is_shared = True
        return PrefixKey(identity, self.tokens, self.images)

    def block_key(self, start: int, stop: int) -> BlockKey:
        """Return what identifies tokens ``start .. stop`` among continuations of their prefix."""
        spans = overlapping(self.spans, start, stop) if self.spans else ()
        return BlockKey(self.tokens[start:stop].tobytes(), spans, start)

    def child_name(self, start: int, stop: int) -> bytes:
        """Return the ``BlockKey.child_name`` of tokens ``start .. stop``: mostly these."""
        if self.spans:
            return self.block_key(start, stop).child_name
        return self.tokens[start:stop].tobytes()

    def num_common_tokens(self, other: "PrefixKey") -> int:
        """Return the length of the longest prefix whose KV two sequences can share."""
        if self.identity.root != other.identity.root:
            return 0
        own_tokens, other_tokens = (
            memoryview(self.tokens).cast("B"),
            memoryview(other.tokens).cast("B"),
        )
        parted = {*self.spans} ^ {*other.spans}
        return min([num_common_tokens(own_tokens, other_tokens), *(span.start for span in parted)])


def _check_images(
    images: tuple[ImageSpan, ...], num_tokens: int, identities: tuple[Identity, ...]
) -> None:
    """Refuse images that overlap, leave the prompt or are split between two identities."""
    end = 0
    for image in images:
        for identity in identities:
            if image.start < identity.start < image.end:
                raise RequestError(
                    f"an identity begins at token {identity.start}, inside the image at tokens "
                    f"{image.start}..{image.end}: begin it at {image.start} or {image.end}"
                )
        if image.length < 1 or image.start < end or image.end > num_tokens:
            raise RequestError(
                f"image at tokens {image.start}..{image.end} overlaps another or leaves the "
                f"prompt of {num_tokens} tokens"
            )
        end = image.end

"""How tiers name KV: a ``Namespace``, a ``Prefix`` of tokens in it, an ``Extent`` of its blocks.

::

    Prefix   ABCD EFGH IJKL MNOP QR      blocks of 4 tokens; the last is not whole
    digests  d1   d2   d3   d4           each of namespace, tenant and all tokens up to its end
    Extent        EFGH IJKL              blocks 1 and 2; its parent is d1
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from ostinato.core.errors import ConfigError
from ostinato.core.identity import tenant_of
from ostinato.core.tokens import TOKEN_BYTES


@dataclass(frozen=True)
class Namespace:
    """Everything that the bytes of a block depend on, except tenant and tokens.

    Attributes:
        weights: Digest of the weights' bytes.
        model_config: Digest of the model's configuration, RoPE included.
        kv_dtype: Format of the KV store, such as ``"bfloat16"``.
        layout: Name of the order in which the store exports a block's bytes.
        block_size: Tokens in a block.
        block_bytes: Bytes of an exported block, over all layers.
        layer_groups: The groups of layers whose bytes a block has: ``("full",)``, or one with gaps
            such as ``("window-512",)`` or ``("state",)``.
        adapter: Digest of the adapter's content; empty without one.
        numerics: Version of the arithmetic: raised when the same tokens give other bits.
    """

    weights: bytes
    model_config: bytes
    kv_dtype: str
    layout: str
    block_size: int
    block_bytes: int
    layer_groups: tuple[str, ...] = ()
    adapter: bytes = b""
    numerics: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError if a block would be empty."""
        if self.block_size < 1 or self.block_bytes < 1:
            raise ConfigError(
                f"block_size={self.block_size}, block_bytes={self.block_bytes}: "
                "both must be at least 1"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether a sequence's blocks are stored with gaps: those of windows, and states."""
        return bool(self.layer_groups) and "full" not in self.layer_groups

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all fields, each after its length, shape (32,)."""
        fields = [
            self.weights,
            self.model_config,
            self.kv_dtype.encode(),
            self.layout.encode(),
            self.block_size.to_bytes(8, "little"),
            self.block_bytes.to_bytes(8, "little"),
            len(self.layer_groups).to_bytes(8, "little"),
            *(group.encode() for group in self.layer_groups),
            self.adapter,
            self.numerics.to_bytes(8, "little"),
        ]
        return hashlib.sha256(b"".join(_after_length(field) for field in fields)).digest()


@dataclass(frozen=True)
class Prefix:
    """Tokens of one tenant from position 0, as tiers name them.

    Its digests are computed once, for every tier and every extent.

    Attributes:
        namespace: What else the bytes depend on.
        tenant: Salt of the tenant, or of a public prefix; empty for the shared namespace.
        tokens: Ids from position 0.
        public_prefix: Salt of the public prefix that the sequence begins with, if any, whose
            erasure erases this too.
        sequence: Opaque value of the caller.
    """

    namespace: Namespace
    tenant: bytes
    tokens: "array[int]"
    public_prefix: bytes = b""
    sequence: object = field(default=None, compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return len(self.tokens) // self.namespace.block_size

    @cached_property
    def packed(self) -> bytes:
        """All tokens as little-endian ``uint32``, shape (num_tokens * 4,)."""
        return self.tokens.tobytes()

    @cached_property
    def root(self) -> bytes:
        """Digest of zero tokens in this namespace and tenant."""
        return hashlib.sha256(
            b"ostinato extents 1" + self.namespace.digest + _after_length(self.tenant)
        ).digest()

    @cached_property
    def digests(self) -> list[bytes]:
        """One digest per whole block, of all tokens up to its end."""
        return block_digests(self.root, self.packed, self.namespace.block_size)

    def digest_before(self, block: int) -> bytes:
        """Digest of all tokens before a block."""
        return self.digests[block - 1] if block else self.root

    def extent(
        self,
        first_block: int,
        num_blocks: int,
        keep_until: float = 0.0,
        refresh_s: float = 0.0,
    ) -> "Extent":
        """Return a run of its blocks."""
        if not 0 <= first_block < first_block + num_blocks <= self.num_blocks:
            raise ConfigError(
                f"blocks {first_block}..{first_block + num_blocks} are not all among the "
                f"{self.num_blocks} whole blocks of the prefix"
            )
        return Extent(self, first_block, num_blocks, keep_until, refresh_s)

    @property
    def salts(self) -> tuple[bytes, bytes, bytes]:
        """Salts whose erasure erases this: tenant, tenant without its client's, public prefix."""
        return self.tenant, tenant_of(self.tenant), self.public_prefix


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of whole blocks of a prefix.

    Attributes:
        prefix: The sequence, which may continue after the extent.
        first_block: Index of its first block.
        num_blocks: At least one.
        keep_until: Wall-clock time (``time.time()``) up to which it is leased; 0 without a lease.
        refresh_s: How long each use extends the lease; 0 if uses do not.
    """

    prefix: Prefix
    first_block: int
    num_blocks: int
    keep_until: float = 0.0
    refresh_s: float = 0.0

    @property
    def packed(self) -> bytes:
        """Its own tokens as little-endian ``uint32``."""
        width = self.prefix.namespace.block_size * TOKEN_BYTES
        return self.prefix.packed[self.first_block * width : self.end_block * width]

    @property
    def end_block(self) -> int:
        """Index after its last block."""
        return self.first_block + self.num_blocks

    @property
    def parent(self) -> bytes:
        """Digest of all tokens before it."""
        return self.prefix.digest_before(self.first_block)

    @property
    def digests(self) -> list[bytes]:
        """One digest per block, of all tokens up to its end."""
        return self.prefix.digests[self.first_block : self.end_block]

    @property
    def payload_bytes(self) -> int:
        """Bytes of its blocks' KV."""
        return self.num_blocks * self.prefix.namespace.block_bytes


def block_digests(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """Chain the digests of whole blocks.

    Args:
        parent: Digest of all tokens before.
        packed: Tokens as little-endian ``uint32``.
        block_size: Tokens per block; a partial block at the end is ignored.

    Cost: about 1 µs for a block.
    """
    width, digests = block_size * TOKEN_BYTES, list[bytes]()
    for start in range(0, len(packed) - width + 1, width):
        parent = hashlib.sha256(parent + packed[start : start + width]).digest()
        digests.append(parent)
    return digests


def _after_length(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value

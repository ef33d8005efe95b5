"""Pseudonyms for tokens and tenants, so that a trace has no content.

A token's pseudonym is 32 bits of a keyed hash of *every* token up to it. Two prompts have the same
pseudonyms exactly as far as their common prefix, down to the single token, and nothing else can
be learned: equal words in other places, or after another beginning, have other pseudonyms. The key
is random and only in memory, while the recording runs. An attacker who can send requests *during*
a recording and read the trace can test whether a prompt begins like another; a trace is for its
operator.

Source: the prefix-chained block ids of Mooncake's traces (arXiv 2407.00079, section 4.1), here
by token and with a key.
"""

import hashlib
import secrets
from array import array
from collections.abc import Iterable

from ostinato.core.identity import SALT_SEPARATOR, Identity, ImageSpan, tenant_of
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.errors import BrokenTrace

_NAME_BYTES = 8


class TokenHasher:
    """Keyed hashes of tokens and tenants, which only show where two are equal."""

    def __init__(self) -> None:
        """Draw a random key."""
        self._key = secrets.token_bytes(32)

    def name(self, content: bytes) -> str:
        """Name a salt, an adapter or an image's content; what is empty stays empty."""
        if not content:
            return ""
        # Another kind of key: a salt must not hash like the first token of a prompt.
        digest = hashlib.blake2b(content, digest_size=_NAME_BYTES, key=self._key, person=b"name")
        return digest.hexdigest()

    def salt(self, salt: bytes) -> str:
        """Name a salt, so that its tenant can be told from what a client added."""
        owner = tenant_of(salt)
        if owner == salt:
            return self.name(salt)
        return self.name(owner) + SALT_SEPARATOR + self.name(salt)

    def public_prefix(self, identity: Identity) -> tuple[str, int] | None:
        """Name the public prefix that a sequence begins with, and count its tokens."""
        num_tokens = identity.num_public_tokens
        return (self.salt(identity.root.tenant), num_tokens) if num_tokens else None

    def prompt(self, tokens: "array[int]", images: Iterable[ImageSpan] = ()) -> "ChainedHash":
        """Name a prompt's tokens.

        Args:
            tokens: Ids, shape (num_tokens,).
            images: Among them; the hashes after an image cover its content as well.
        """
        chain = ChainedHash(self._key)
        chain.extend(tokens, {image.start: image for image in images})
        return chain


class ChainedHash:
    """The pseudonyms of a row of tokens, which can be continued.

    Attributes:
        names: Little-endian ``uint32``, shape (num_tokens * 4,).
    """

    def __init__(self, key: bytes) -> None:
        """Start without a token."""
        self.names = bytearray()
        self._hash = hashlib.blake2b(key=key, digest_size=TOKEN_BYTES, person=b"token")

    def extend(self, tokens: "array[int]", images: "dict[int, ImageSpan] | None" = None) -> None:
        """Name more tokens; cost: one hash of 4 bytes each, about a microsecond."""
        state, packed = self._hash, tokens.tobytes()
        digests = []
        for place in range(len(tokens)):
            if images and place in images:
                state.update(b"image" + images[place].digest)
            state.update(packed[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES])
            digests.append(state.copy().digest())
        self.names += b"".join(digests)

    def continued(self, tokens: "array[int]") -> bytes:
        """Return the pseudonyms of one continuation; this row does not change."""
        branch = ChainedHash.__new__(ChainedHash)
        branch.names, branch._hash = bytearray(), self._hash.copy()
        branch.extend(tokens)
        return bytes(branch.names)


def unpack_names(names: bytes) -> "array[int]":
    """Return pseudonyms as token ids.

    Raises:
        BrokenTrace: The bytes are no whole number of them.
    """
    if len(names) % TOKEN_BYTES:
        raise BrokenTrace(f"{len(names)} bytes are no whole number of pseudonyms of {TOKEN_BYTES}")
    return array("I", names)

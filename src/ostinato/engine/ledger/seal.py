"""Names of turns that clients keep for the server: encrypted reasoning, signatures of thinking.

A name is the place and the number of a turn, sealed with AES-GCM under a key of its namespace. It
holds no text. A client that sends it back chooses a turn by it, where the place is the same; a name
of another tenant, a forged one or one of another process cannot be opened, and chooses nothing.
"""

import base64
import binascii
import secrets
from dataclasses import dataclass
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "ost1_"
"""The beginning of every sealed name, so that those of other vendors are told apart."""

_NONCE_BYTES = 12
_MAX_CHARS = 512
"""Longer texts are no names of ours."""


@dataclass(frozen=True, slots=True)
class TurnName:
    """What a sealed name says.

    Attributes:
        place: The place of the turn.
        number: Which of the turns at that place: 16 random bytes.
    """

    place: bytes
    number: bytes


class TurnSeal:
    """Seals names of turns for their tenants, with a key of this process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def seal(self, namespace: bytes, name: TurnName) -> str:
        """Return a name as a text that only this process can read, for this namespace."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher(namespace).encrypt(nonce, name.place + name.number, namespace)
        return PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode().rstrip("=")

    def open(self, namespace: bytes, text: str) -> TurnName | None:
        """Return what a sealed name says; None if it is not one of this namespace."""
        if not text.startswith(PREFIX) or len(text) > _MAX_CHARS:
            return None
        encoded = text.removeprefix(PREFIX)
        try:
            data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            opened = self._cipher(namespace).decrypt(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], namespace
            )
        except (binascii.Error, ValueError, InvalidTag):
            return None
        return TurnName(opened[:-16], opened[-16:])

    def _cipher(self, namespace: bytes) -> AESGCM:
        key = blake2b(namespace, digest_size=32, key=self._secret, person=b"turn seal").digest()
        return AESGCM(key)

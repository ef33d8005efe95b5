"""The bytes or the text of each token of a tokenizer.

Each distinct id is looked up once, so share one table per tokenizer.

========================  ========================================  =====================
tokenizer                 a token is                                example
========================  ========================================  =====================
byte-level BPE            bytes                                     GPT-2, Llama 3, Qwen
pieces, byte fallback     text, or one byte written ``<0xE4>``      Llama 2, Gemma, Mistral
anything else             text                                      Unigram, characters
========================  ========================================  =====================
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import ByteLevel

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One id."""

    known: bool  # whether the tokenizer has it; models often have more ids than their tokenizer
    special: bool = False  # whether ``skip_special_tokens`` leaves it out
    data: bytes | None = None  # its bytes; None if it is text, which depends on the tokens before


class TokenTable:
    """The tokens of any tokenizer of ``transformers``; grows by an entry per id looked up."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_of = dict(_byte_alphabet()) if isinstance(decoder, ByteLevel) else None
        self.entry = functools.cache(self._look_up)  # the entry of an id
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, special ones included.

        Never cleans up spaces before punctuation: that would change text already shown, and
        it damages what the model wrote (`` .5`` becomes ``.5``).
        """
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def id_of(self, text: str) -> int | None:
        """Return the id of a token such as ``</think>``; None if there is none."""
        ids = self._tokenizer.convert_tokens_to_ids([text])
        token_id = (
            None if not ids or ids[0] in (None, self._tokenizer.unk_token_id) else int(ids[0])
        )
        return token_id if token_id is None or self.text(token_id) == text else None

    def text(self, token_id: int) -> str:
        """Return an id's text in the middle of a text, as for lists of log-probabilities.

        A leading space is kept, which ``decode([token_id])`` of many tokenizers strips; part of
        a character shows as U+FFFD, an id that the tokenizer does not know as nothing.
        """
        text = self._texts.get(token_id)
        if text is not None:
            return text
        entry, text = self.entry(token_id), ""
        if entry.data is not None:
            text = entry.data.decode("utf-8", "replace")
        elif entry.known:  # twice in a row: the second one is in the middle of a text
            text = self.decode([token_id, token_id])[len(self.decode([token_id])) :]
        self._texts[token_id] = text
        return text

    def _look_up(self, token_id: int) -> TokenEntry:
        """Ask the tokenizer about an id."""
        try:
            token = self._tokenizer.convert_ids_to_tokens(token_id)  # None if unknown
        except (LookupError, ValueError):  # unknown to a slow tokenizer
            token = None
        if token is None:
            return TokenEntry(known=False)
        text = self.decode([token_id])
        shown = self._tokenizer.decode([token_id], skip_special_tokens=True)
        special = bool(text) and not shown
        return TokenEntry(known=True, special=special, data=self._bytes(str(token), text))

    def _bytes(self, token: str, text: str) -> bytes | None:
        """Return the bytes of a token, if it has any.

        Args:
            token: Its entry in the vocabulary.
            text: What it decodes to alone; a tokenizer without byte fallback repeats ``<0xE4>``.
        """
        if self._byte_of is not None:
            values = [self._byte_of.get(character) for character in token]
            plain = [value for value in values if value is not None]
            return bytes(plain) if len(plain) == len(values) else token.encode()
        piece = _BYTE_PIECE.fullmatch(token)
        return bytes([int(piece[1], 16)]) if piece and text != token else None


def piece_writer(decoder: Any) -> Callable[[str], str]:
    """Return how a tokenizer with this decoder spells a text as one piece of its vocabulary."""
    if not isinstance(decoder, ByteLevel):
        return lambda text: text.replace(" ", "\u2581")
    letters = {byte: letter for letter, byte in _byte_alphabet()}
    return lambda text: "".join(letters[byte] for byte in text.encode())


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """Yield the character that represents each byte in byte-level BPE.

    Printable bytes of Latin-1 represent themselves, others are characters from U+0100 on.
    Source: ``bytes_to_unicode`` of GPT-2 (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    yield from ((chr(byte), byte) for byte in sorted(printable))
    yield from ((chr(0x100 + place), byte) for place, byte in enumerate(others))

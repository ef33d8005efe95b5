"""Turns tokens into text incrementally, by whole characters.

The text of an output is what it adds to the prompt: ``decode(prompt + output)`` without
``decode(prompt)``. Tokens arrive one at a time, with two difficulties:

* **Partial characters.** A token may end within a character. Tokens of bytes go through an
  incremental UTF-8 decoder, which emits whole characters and replaces invalid bytes by U+FFFD.
* **Context.** ``▁world`` is " world" after another token and "world" at the start. Tokens of text
  are therefore decoded together with the last few before them::

      already text      pending
      ▁Hel lo , ▁      world          decode(all of these) without decode(already text)
      └─ context ─┘

Equal to ``tokenizer.decode`` of everything, with one exception: where a byte-fallback tokenizer
meets a run of byte pieces that is not valid UTF-8 (``max_tokens`` cutting a character is enough),
it replaces every byte of the whole run, even of valid characters that were emitted long before.
Here the valid ones are kept, as in a byte-level tokenizer.

Rejected: ``tokenizers.decoders.DecodeStream``. It supports fast tokenizers only, has no call to
flush the rest, grows its window while bytes are invalid, and raises "Invalid prefix encountered"
where a run of byte pieces changes its beginning (vLLM catches this and starts over).

Source of the two offsets: Hugging Face text-generation-inference, as in vLLM's detokenizer.

The bytes or the text of each token are in a table. Each distinct id is looked up once, so share one
table per tokenizer.

========================  ========================================  =====================
tokenizer                 a token is                                example
========================  ========================================  =====================
byte-level BPE            bytes                                     GPT-2, Llama 3, Qwen
pieces, byte fallback     text, or one byte written ``<0xE4>``      Llama 2, Gemma, Mistral
anything else             text                                      Unigram, characters
========================  ========================================  =====================
"""

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
        self.shown = functools.cache(self._shown)  # an id that is part of a text, with its bytes
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

    def _shown(self, token_id: int, skip_special_tokens: bool) -> tuple[int, bytes | None] | None:
        """Return an id with its bytes, if any; None if it is no part of a text."""
        entry = self.entry(token_id)
        is_hidden = entry.special and skip_special_tokens
        return (token_id, entry.data) if entry.known and not is_hidden else None

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


_CONTEXT_TOKENS = 4
"""Tokens of context: more than one, since one may decode to nothing; and the bytes of an
unfinished character at the end of a prompt are at most three."""

_PATIENCE_TOKENS = 16
"""Tokens without final text before they are accepted: a character has four bytes, so longer runs
are invalid, and waiting would cost more with each token."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """One output's text, growing by whole characters."""

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: Of ``transformers``, fast or slow; or its ``TokenTable``, which requests can
                share.
            skip_special_tokens: Leave special tokens out of the text.
            prompt: Ids before the output, of which the last few are read. A character that begins
                in the prompt and ends in the output belongs to the output.
        """
        self._table = tokenizer if isinstance(tokenizer, TokenTable) else TokenTable(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_shown = 0  # characters of the pending tokens that were emitted
        tail: list[tuple[int, bytes | None]] = []
        for token in reversed(prompt):
            if len(tail) == _CONTEXT_TOKENS:
                break
            if shown := self._table.shown(token, skip_special_tokens):
                tail.append(shown)
        tail.reverse()
        ids, pieces = map(list, zip(*tail, strict=True)) if tail else ([], [])
        is_text = pieces.count(None) == len(pieces) > 0
        if is_text and (text := self._table.decode(ids)) and not text.endswith(_REPLACEMENT):
            self._context = ids  # each ends with a whole character
            return
        for token, data in tail:
            self._take(token, data)

    def append(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that is final with them.

        Ids that the tokenizer does not know have no text. Cost: O(1) decoded ids per token.
        """
        text = ""
        for token in token_ids:
            if shown := self._table.shown(token, self._skip_special_tokens):
                text += self._take(*shown)
        return text

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is that of all tokens so far: none waits for the next."""
        return not self._pending and not self._utf8.getstate()[0]

    def finish(self) -> str:
        """Return the rest of the text, an unfinished character as U+FFFD."""
        pending = self._flush_pending(self._pending_text()) if self._pending else ""
        return pending + self._utf8.decode(b"", final=True)

    def _take(self, token: int, data: bytes | None) -> str:
        """Add one token."""
        # At the start of a text a decoder may strip a space, even one spelled as a byte.
        starts = not self._context and data is not None and data.isascii()
        if data is None or starts:
            return self._utf8.decode(b"", final=True) + self._take_text(token)
        pending = self._flush_pending(self._pending_text()) if self._pending else ""
        self._context = [*self._context, token][-_CONTEXT_TOKENS:]
        return pending + self._utf8.decode(data)

    def _take_text(self, token: int) -> str:
        """Add a token that is decoded after others; slow tokenizers may hide bytes in it."""
        self._pending.append(token)
        text = self._pending_text()
        final = text.rstrip(_REPLACEMENT)
        if len(self._pending) >= _PATIENCE_TOKENS or (text and final == text):
            return self._flush_pending(text)
        new_text = final[self._num_shown :]
        self._num_shown += len(new_text)
        return new_text

    def _flush_pending(self, text: str) -> str:
        """Move the pending tokens, with this text, to the context; return what they add."""
        new_text = text[self._num_shown :]
        self._context = [*self._context, *self._pending][-_CONTEXT_TOKENS:]
        self._pending, self._num_shown = [], 0
        return new_text

    def _pending_text(self) -> str:
        """Return what the pending tokens add to the context."""
        before = self._table.decode(self._context) if self._context else ""
        after = self._table.decode(self._context + self._pending)
        if after.startswith(before):
            return after[len(before) :]
        # A decoder may rewrite its end, such as one for "@@ " marks: emitted text stays.
        pairs = zip(before, after, strict=False)
        return after[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

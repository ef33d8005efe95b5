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
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from ostinato.engine.text.token_table import TokenTable

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
            if entry := self._shown(token):
                tail.append(entry)
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
        return "".join([self._take(*e) for token in token_ids if (e := self._shown(token))])

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is that of all tokens so far: none waits for the next."""
        return not self._pending and not self._utf8.getstate()[0]

    def finish(self) -> str:
        """Return the rest of the text, an unfinished character as U+FFFD."""
        return self._flush_pending() + self._utf8.decode(b"", final=True)

    def _shown(self, token: int) -> tuple[int, bytes | None] | None:
        """Return a token with its bytes, if any; None if it is no part of the text."""
        entry = self._table.entry(token)
        is_hidden = entry.special and self._skip_special_tokens
        return (token, entry.data) if entry.known and not is_hidden else None

    def _take(self, token: int, data: bytes | None) -> str:
        """Add one token."""
        # At the start of a text a decoder may strip a space, even one spelled as a byte.
        starts = not self._context and data is not None and data.isascii()
        if data is None or starts:
            return self._utf8.decode(b"", final=True) + self._take_text(token)
        text = self._flush_pending() + self._utf8.decode(data)
        self._remember([token])
        return text

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

    def _flush_pending(self, text: str | None = None) -> str:
        """Accept the pending tokens, with their text if it is known; return what they add."""
        if not self._pending:
            return ""
        text = (self._pending_text() if text is None else text)[self._num_shown :]
        self._remember(self._pending)
        self._pending, self._num_shown = [], 0
        return text

    def _remember(self, tokens: list[int]) -> None:
        """Move emitted tokens to the context."""
        self._context = [*self._context, *tokens][-_CONTEXT_TOKENS:]

    def _pending_text(self) -> str:
        """Return what the pending tokens add to the context."""
        before = self._table.decode(self._context) if self._context else ""
        after = self._table.decode(self._context + self._pending)
        if after.startswith(before):
            return after[len(before) :]
        # A decoder may rewrite its end, such as one for "@@ " marks: emitted text stays.
        pairs = zip(before, after, strict=False)
        return after[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]

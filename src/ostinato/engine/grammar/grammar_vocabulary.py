"""The vocabulary of a tokenizer for ``llguidance``: the bytes of each token id.

``llguidance`` reads byte-level BPE and byte fallback itself. For other tokenizers, and those that
are not written in Rust, the bytes come from a ``TokenTable``.

Such a vocabulary may lack bytes, while the library assumes that any text can be written. So each
missing byte gets an id beyond those of the model::

    0 .. vocab_size - 1        tokens of the model
    vocab_size ..              bytes that it lacks, and an end of sequence if it has none:
                               never sampled

Where a grammar forces one of them, no id of the model is allowed.

``llguidance`` also takes added tokens such as ``<tool_call>`` for special ones, because of their
angle brackets, whatever the tokenizer says. Then no text may contain them, and a grammar that
begins with one allows a token that it refuses afterwards. So tokens that are not special are handed
over as ordinary ones.
"""

import json
from contextlib import suppress
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from ostinato.engine.text.detokenizer import TokenTable, piece_writer


def grammar_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: list[int]
) -> LLTokenizer:
    """Describe a vocabulary to ``llguidance``.

    Args:
        tokenizer: Fast or slow.
        vocab_size: Ids that the model has logits for; those beyond the tokenizer are never allowed.
        eos_token_ids: Ids that end a text; allowed where the grammar may end. A model may have
            none.
    """
    num_ids = max(vocab_size, len(tokenizer))
    if eos_token_ids:
        # It refuses tokenizers that are not fast, or have an unknown decoder.
        with suppress(ValueError):
            fast: Any = tokenizer
            described = _with_plain_marks(fast)
            if described is not None:
                return LLTokenizer(described, n_vocab=num_ids, eos_token=eos_token_ids)
            return from_tokenizer(fast, n_vocab=num_ids, eos_token=eos_token_ids)
    table = _Bytes(TokenTable(tokenizer), num_ids, eos_token_ids)
    return LLTokenizer(
        TokenizerWrapper(table), n_vocab=len(table.tokens), eos_token=table.eos_token_ids
    )


def _with_plain_marks(tokenizer: Any) -> str | None:
    """Return a tokenizer's description with marks as ordinary tokens; None where it has none.

    A mark is an added token in angle brackets that is not special.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    described = json.loads(backend.to_str())
    marks = [
        token
        for token in described["added_tokens"]
        if not token["special"] and token["content"][:1] == "<" and token["content"][-1:] == ">"
    ]
    if not marks or described["model"].get("type") != "BPE":
        return None
    described["added_tokens"] = [t for t in described["added_tokens"] if t not in marks]
    described |= {"padding": None, "truncation": None}
    write = piece_writer(backend.decoder)
    described["model"]["vocab"] |= {write(token["content"]): token["id"] for token in marks}
    return json.dumps(described)


class _Bytes:
    """A vocabulary as rows of bytes, in the shape that ``TokenizerWrapper`` reads."""

    bos_token_id: int | None = None

    def __init__(self, table: TokenTable, num_ids: int, eos_token_ids: list[int]) -> None:
        entries = [table.entry(token) for token in range(num_ids)]
        self.special_token_ids = [i for i, e in enumerate(entries) if e.special or not e.known]
        self.tokens = [
            f"<|{i}|>".encode() if e.special or not e.known else e.data or table.text(i).encode()
            for i, e in enumerate(entries)
        ]
        if not eos_token_ids:
            eos_token_ids = [len(self.tokens)]
            self.special_token_ids += eos_token_ids
            self.tokens.append(b"<|end|>")
        self.eos_token_ids, self.eos_token_id = eos_token_ids, eos_token_ids[0]
        plain = set(range(num_ids)) - set(self.special_token_ids)
        self._ids = {self.tokens[i]: i for i in sorted(plain, reverse=True) if self.tokens[i]}
        for byte in (bytes([value]) for value in range(256)):
            if byte not in self._ids:
                self._ids[byte] = len(self.tokens)
                self.tokens.append(byte)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize bytes greedily, from the left."""
        ids, start = [], 0
        while start < len(text):
            longest = min(len(text), start + self._longest)
            end = next(e for e in range(longest, start, -1) if text[start:e] in self._ids)
            ids.append(self._ids[text[start:end]])
            start = end
        return ids

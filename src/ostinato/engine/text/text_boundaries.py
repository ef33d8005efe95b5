r"""Finds where a text can be cut so that its parts have the tokens of the whole.

That is right after a special token, such as the end of a turn. A tokenizer first cuts its added
tokens out of a text, leftmost and longest first, then tokenizes each piece between them::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>...
    └─ token ──┘└ piece ┘└ token ─┘└┘└─ token ──┘

So a piece has the same tokens wherever it follows such a token. Tokens for which this may not hold
are not used:

* Another added token overlaps it (``<|end|>`` and ``<|end|>now``): then its letters in a text are
  not always this token.
* It takes the white space after it (``rstrip``), or matches whole words only (``single_word``).

Some tokenizers treat the very start of a text differently (they put a space before it), so a part
is tokenized with the token before it in front, which is then removed.

Tokenizers for which this is not known to hold (slow ones, their own Python code, random merges)
have no boundaries at all, and a text is tokenized as a whole.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_MODELS = {"BPE", "Unigram", "WordPiece", "WordLevel"}
_NORMALIZERS = {
    *("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Replace"),
    *("Prepend", "Precompiled", "BertNormalizer", "Nmt", "ByteLevel"),
}
_PRE_TOKENIZERS = {
    *("Sequence", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Metaspace", "Split"),
    *("Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "UnicodeScripts", "FixedLength"),
}
"""Kinds that treat each piece by itself; ``Metaspace`` differs in the first piece only."""


@dataclass(frozen=True, slots=True)
class TextBoundaries:
    """The tokens of one tokenizer after which a text may be cut."""

    ids: dict[bytes, int]  # of each, by its letters in UTF-8
    pattern: re.Pattern[bytes]  # finds them in a text
    before: re.Pattern[bytes]  # matches those that take no white space before them

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TextBoundaries":
        """Find the usable tokens of a tokenizer; there may be none."""
        tokens = _usable_tokens(tokenizer) if _treats_pieces_alone(tokenizer) else {}
        letters = {token.content.encode(): token for token in tokens.values()}
        return cls(
            {token.content.encode(): token_id for token_id, token in tokens.items()},
            _any_of(letters),
            _any_of(text for text, token in letters.items() if not token.lstrip),
        )

    def split(self, text: bytes, start: int = 0) -> list[tuple[int, int]]:
        """Return the boundaries of a text after ``start``: where, and how long the token is.

        ``start`` must be 0, a boundary, or the start of one of the tokens.
        """
        return [(m.end(), m.end() - m.start()) for m in self.pattern.finditer(text, start)]


def _any_of(letters: Any) -> re.Pattern[bytes]:
    """Return a pattern for any of some texts; one that never matches if there are none."""
    return re.compile(b"|".join(map(re.escape, letters)) or rb"(?!)")


def _treats_pieces_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokens of a piece between added tokens depend on that piece alone."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return False
    for method in ("__call__", "_encode_plus"):  # Python code of the model's own may do anything
        if getattr(type(tokenizer), method) is not getattr(PreTrainedTokenizerFast, method):
            return False
    backend = tokenizer.backend_tokenizer
    model = backend.model
    if type(model).__name__ not in _MODELS or getattr(model, "dropout", None):
        return False
    parts = ((backend.normalizer, _NORMALIZERS), (backend.pre_tokenizer, _PRE_TOKENIZERS))
    return all(_kinds(part) <= known for part, known in parts)


def _kinds(part: Any) -> set[str]:
    """Return the kinds of a normalizer or pre-tokenizer and of those in it."""
    if part is None:
        return set()
    try:
        state = json.loads(part.__getstate__())
    except Exception:  # one that is written in Python has no state to read
        return {"unknown"}
    parts = [state]
    for known in parts:  # grows while it is walked
        parts += known.get("normalizers", ()) or known.get("pretokenizers", ())
    return {str(known.get("type")) for known in parts}


def _usable_tokens(tokenizer: Any) -> dict[int, Any]:
    """Return the added tokens that stand for their letters wherever these occur."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    raw = {n: token for n, token in added.items() if not token.normalized and token.content}
    template = str(tokenizer.chat_template or "")
    suffixes = {t.content[i:] for t in raw.values() for i in range(1, len(t.content))}
    everything = "\0".join(token.content for token in raw.values())

    def is_usable(token: Any) -> bool:
        text = token.content
        if token.rstrip or token.single_word or text != text.strip():
            return False
        if not (token.special or text in template):
            return False  # there may be thousands that no prompt has
        is_apart = all(text[:end] not in suffixes for end in range(1, len(text)))
        return is_apart and everything.count(text) == 1

    return {token_id: token for token_id, token in raw.items() if is_usable(token)}

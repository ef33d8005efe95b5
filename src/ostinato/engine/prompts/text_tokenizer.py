r"""Tokenizes only the part of a text that is not known.

::

    text ─► begin: the longest known text that it begins with ─► finish: tokenize the rest ─► tokens
                        ▲                                                                       │
                        └──────── note, when a request is taken; note_answer, when it ends ◄────┘

Generated text keeps its tokens: a tokenizer may split the same text otherwise, and then the cache
would miss. All other text has the tokens that it has when the whole is tokenized at once, since
parts are joined at ``TextBoundaries`` only.

A text may be cut where its parts have the tokens of the whole. That is right after a special token,
such as the end of a turn. A tokenizer first cuts its added tokens out of a text, leftmost and
longest first, then tokenizes each piece between them::

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
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ostinato.engine.requests.request_validation import refuse_long_text
from ostinato.engine.text.detokenizer import Detokenizer, TokenTable
from ostinato.engine.text.known_texts import KnownTexts, Places, TokenizedText

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
    pattern: re.Pattern[bytes]  # finds them in a text, from 0, a boundary or one of them on
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


@dataclass(frozen=True, slots=True)
class PartialText:
    """A text whose beginning is known."""

    text: bytes  # all of it, in UTF-8
    known: TokenizedText | None = None  # a text with the same beginning
    end: int = 0  # bytes that they have in common, up to a boundary
    count: int = 0  # tokens of the known text for those bytes
    width: int = 0  # bytes of the special token that ends there; 0 if one begins there
    tokens_between: tuple[int, ...] = ()  # further tokens, before the rest
    is_cut: bool = True  # whether the rest may be cut at boundaries

    @property
    def num_left(self) -> int:
        """Bytes that are not tokenized yet."""
        return len(self.text) - self.end


class TextTokenizer:
    """Tokenizes texts for one model, and remembers them; safe in any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self.table = TokenTable(tokenizer)  # the text of each token
        self.boundaries = TextBoundaries.of(tokenizer)  # where texts may be cut
        self._letters = {token_id: text for text, token_id in self.boundaries.ids.items()}
        self._widest = max(map(len, self._letters.values()), default=0)
        self.known = KnownTexts(max_bytes if self._letters else 0, self._add_answer)
        self.num_tokenized_bytes = 0  # of text that went through the tokenizer
        self._before = _special_tokens(tokenizer) if self._letters else None

    def begin(
        self, text: str, namespaces: Iterable[bytes], keep_tokens: bool = True
    ) -> PartialText:
        """Find the longest known text that a text begins with.

        Args:
            text: All of it.
            namespaces: Whose texts may be used.
            keep_tokens: False uses none, and tokenizes the text as a whole.
        """
        data = text.encode()
        best = PartialText(data, is_cut=keep_tokens)
        for namespace in namespaces if keep_tokens else ():
            for known, num_alike in self.known.nearest(namespace, data):
                cut = self._cut(data, known, num_alike)
                best = cut if cut.count > best.count else best
        return best

    def finish(
        self,
        partly: PartialText,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int | None = None,
    ) -> TokenizedText:
        """Tokenize the rest of a text.

        Args:
            partly: As ``begin`` returned it.
            tokenizer: A copy of the model's, for use in another thread; None is the model's own.
            max_tokens: Tokens that could be served; None is no bound.

        Raises:
            PromptTooLong: The rest is certainly longer than ``max_tokens``.
        """
        tokenizer, text = tokenizer or self._tokenizer, partly.text
        if max_tokens is not None:
            refuse_long_text(text[partly.end :].decode(), max_tokens, tokenizer)
        self.num_tokenized_bytes += len(text) - partly.end
        if not partly.is_cut:
            [whole] = _encode(tokenizer, [text])
            return TokenizedText(text, array("I", whole))
        tokens, boundaries = array("I"), Places()
        generated: tuple[tuple[int, int], ...] = ()
        if partly.known is not None:
            tokens = partly.known.tokens[: partly.count]
            tokens.extend(partly.tokens_between)
            boundaries = partly.known.boundaries.up_to(partly.end)
            generated = partly.known.generated_before(partly.count)
        self._append_rest(tokenizer, partly, tokens, boundaries)
        return TokenizedText(text, tokens, boundaries, generated=generated)

    @property
    def takes_prompts(self) -> bool:
        """Whether plain prompts, too, can be composed of known and new parts."""
        return self._before is not None

    def with_special_tokens(self, known: TokenizedText) -> "array[int]":
        """Return a text's ids as a prompt of its own."""
        assert self._before is not None, "see takes_prompts"
        return array("I", self._before) + known.tokens

    def spell(self, tokens: "array[int]", before: "array[int]") -> str:
        """Return the text that tokens add to those before them, special ones included."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=False, prompt=before)
        return detokenizer.append(tokens) + detokenizer.finish()

    def num_tokens_before(self, known: TokenizedText, end: int) -> int:
        """Return how many tokens of a text stand before a byte of it that begins a token."""
        places = known.boundaries.up_to(end)
        start, count = (places.ends[-1], places.counts[-1]) if places.ends else (0, 0)
        [rest] = _encode(self._tokenizer, [known.text[start:end]])
        return count + len(rest)

    def _cut(self, text: bytes, known: TokenizedText, num_alike: int) -> PartialText:
        """Return how much of a text can be taken from one with the same beginning."""
        places = known.boundaries.up_to(num_alike)
        end, count, width = 0, 0, 0
        if len(places.ends):
            end, count, width = places.ends[-1], places.counts[-1], places.widths[-1]
        at_boundary = PartialText(text, known, end, count, width)
        if not known.answer.ends or known.answer.ends[-1] <= end:
            return at_boundary
        ahead = self.boundaries.before.finditer(text, end, num_alike + self._widest)
        ends = [match.start() for match in ahead if match.start() <= num_alike]
        return self._cut_answer(text, known, ends[-1]) or at_boundary if ends else at_boundary

    def _cut_answer(self, text: bytes, known: TokenizedText, end: int) -> PartialText | None:
        """Cut an answer where a special token ends it in another text; None if that is impossible.

        Within a token, as before a stop string, the rest of that token is tokenized again.
        """
        places = known.answer.up_to(end)
        if not places.ends:
            return None
        count, part = places.counts[-1], text[places.ends[-1] : end]
        if not part:
            return PartialText(text, known, end, count)
        [tokens] = _encode(self._tokenizer, [part])
        if self.spell(array("I", tokens), known.tokens[max(0, count - 8) : count]).encode() != part:
            return None  # such as one that puts a space before each text
        return PartialText(text, known, end, count, tokens_between=tuple(tokens))

    def _append_rest(
        self,
        tokenizer: PreTrainedTokenizerBase,
        partly: PartialText,
        tokens: "array[int]",
        boundaries: Places,
    ) -> None:
        """Tokenize the rest in parts, each after the special token before it."""
        text, start, lead = partly.text, partly.end - partly.width, partly.width
        parts: list[tuple[int, int, int, int]] = []  # start, width in front, end, width at the end
        pieces: list[bytes] = []
        for match in self.boundaries.pattern.finditer(text, partly.end):
            parts.append((start, lead, match.end(), len(match[0])))
            pieces.append(text[start : match.end()])
            start, lead = match.start(), len(match[0])
        if start + lead < len(text):
            parts.append((start, lead, len(text), 0))
            pieces.append(text[start:])
        rows = _encode(tokenizer, pieces)
        for (start, lead, end, width), row in zip(parts, rows, strict=True):
            if lead:
                assert row[0] == self.boundaries.ids[text[start : start + lead]], "it is a boundary"
            tokens.fromlist(row[bool(lead) :])
            if width:
                boundaries.add(end, len(tokens), width)

    def _add_answer(self, prompt: TokenizedText, answer: "array[int]") -> TokenizedText:
        """Decode an answer, and note where another text may branch off."""
        detokenizer = Detokenizer(self.table, skip_special_tokens=False, prompt=prompt.tokens)
        end = len(prompt.text)
        boundaries, within, pieces = prompt.boundaries.up_to(end), Places(), [prompt.text]
        for count, token in enumerate(answer, len(prompt) + 1):
            piece = detokenizer.append([token]).encode()
            pieces.append(piece)
            end += len(piece)
            letters = self._letters.get(token)
            if letters and piece.endswith(letters):
                if len(piece) > len(letters):  # it also ends half a character before it
                    within.add(end - len(letters), count - 1)
                boundaries.add(end, count, len(letters))
            if piece and detokenizer.is_complete:
                within.add(end, count)
        rest = detokenizer.finish().encode()
        if rest:  # half a character
            within.add(end + len(rest), len(prompt) + len(answer))
        text, tokens = b"".join([*pieces, rest]), prompt.tokens + answer
        generated = (*prompt.generated, (len(prompt), len(tokens)))
        return TokenizedText(text, tokens, boundaries, within, generated)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[bytes]) -> list[list[int]]:
    """Return the ids of texts, without special tokens around them."""
    if not texts:
        return []
    encoded: Any = tokenizer(
        list(map(bytes.decode, texts)),
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,  # admission refuses a prompt that is too long
    )
    return list(encoded["input_ids"])


_POST_PROCESSORS = {
    *("Sequence", "TemplateProcessing", "ByteLevel", "BertProcessing", "RobertaProcessing"),
}


def _special_tokens(tokenizer: Any) -> list[int] | None:
    """Return what a tokenizer puts before each text; None if unknown, or if it appends too."""
    processor = tokenizer.backend_tokenizer.post_processor
    state = {} if processor is None else json.loads(processor.__getstate__())
    kinds = {part.get("type") for part in (state, *state.get("processors", ())) if part}
    if not kinds <= _POST_PROCESSORS:
        return None
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    num_before = len(whole) - len(bare)
    return whole[:num_before] if bare and whole[num_before:] == bare else None

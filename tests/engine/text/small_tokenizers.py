"""Small tokenizers of every kind, trained on the spot."""

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import trainers as train
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "Hello, world! It isn't so: 3.14 is  not  22/7.\n\n\tIndented , and spaced .",
    "naïve café, Cafe\u0301 with a combining accent, Z\u0351\u036b\u0343algo",
    "你好，世界。吾輩は猫である。안녕하세요",
    "thumbs 👍🏽, a family 👩‍👩‍👧‍👦, flags 🇳🇵🇺🇳, keycap 1️⃣",
    " 👍 and  two spaces",
    "བོད་སྐད་ and 𐍈𐌰𐌹 and \u200f\u05e9\u05dc\u05d5\u05dd\u200e",
]
"""English, combining marks, CJK, joined emoji, spaces, and scripts that no small vocabulary
has."""

_KNOWN = [TEXTS[0], "hello hello world, the world is not so", "你好 世界"]
_SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2 and Qwen, with added tokens that are not over its alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = train.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(_KNOWN, trainer)
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("Ġtagé")])
    return _wrap(tokenizer)


def llama() -> PreTrainedTokenizerFast:
    """BPE with byte fallback that strips one space off the start of a text."""
    return _byte_fallback(decoders.Strip(" ", 1, 0))


def gemma() -> PreTrainedTokenizerFast:
    """BPE with byte fallback that strips nothing."""
    return _byte_fallback()


def unigram() -> PreTrainedTokenizerFast:
    """Unigram pieces behind Metaspace, as of T5 and XLNet."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = train.UnigramTrainer(
        vocab_size=150, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*_KNOWN, *TEXTS[:2]], trainer)
    return _wrap(tokenizer)


def word_pieces() -> PreTrainedTokenizerFast:
    """WordPiece, whose decoder puts spaces between words and takes them before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = train.WordPieceTrainer(vocab_size=200, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*_KNOWN, *TEXTS[:2]], trainer)
    return _wrap(tokenizer)


def word_ends() -> PreTrainedTokenizerFast:
    """BPE that marks the ends of words, as of GPT-1; the last token of a text has no space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = train.BpeTrainer(
        vocab_size=200, special_tokens=_SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([*_KNOWN, *TEXTS[:2]], trainer)
    return _wrap(tokenizer)


def characters() -> Any:
    """The model that ships with the package: one token per character."""
    return AutoTokenizer.from_pretrained(str(files("ostinato.models") / "tiny-shakespeare"))


class HiddenBytes(PreTrainedTokenizer):
    """A slow tokenizer whose tokens do not say their bytes, as wrappers of tiktoken.

    Ids 0 .. 255 are single bytes; the rest begin or end within a character.
    """

    _WIDE = (b"so", b" \xf0\x9f", b"\x98\x80!", b"\xbd\xa0 \xe4", b"a\xe4")

    def __init__(self, **kwargs: Any) -> None:
        self._bytes = [bytes([byte]) for byte in range(256)] + list(self._WIDE)
        super().__init__(unk_token="<unk>", eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def get_vocab(self) -> dict[str, int]:
        return {f"token-{i}": i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [f"token-{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token.removeprefix("token-"))

    def _convert_id_to_token(self, index: int) -> str:
        if index >= self.vocab_size:
            raise IndexError(index)
        return f"token-{index}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        pieces = (
            self._bytes[int(token[6:])] if token.startswith("token-") else token.encode()
            for token in tokens
        )
        return b"".join(pieces).decode(errors="replace")


class JoinMarks(PreTrainedTokenizer):
    """A slow tokenizer that marks tokens which go on with "@@", as of CTRL.

    Its decoder rewrites what it gave before: "wor@@" alone, but "world" with the next token.
    """

    _WORDS = ("hello", "wor@@", "ld", "so")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._WORDS)

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self._WORDS)} | self.added_tokens_encoder

    def _convert_id_to_token(self, index: int) -> str:
        return self._WORDS[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace("@@ ", "")


FAST: dict[str, Callable[[], Any]] = {
    "byte_level": cache(byte_level),
    "llama": cache(llama),
    "gemma": cache(gemma),
    "unigram": cache(unigram),
    "word_pieces": cache(word_pieces),
    "word_ends": cache(word_ends),
    "characters": cache(characters),
}
ALL: dict[str, Callable[[], Any]] = {**FAST, "hidden_bytes": cache(HiddenBytes)}


def _byte_fallback(*end: decoders.Decoder) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE as converted for Llama and Gemma."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = train.BpeTrainer(
        vocab_size=420, special_tokens=[*_SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(_KNOWN, trainer)
    # The trainer gave the bytes ids by adding them as special tokens; they are ordinary pieces.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in _SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )

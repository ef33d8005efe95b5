"""The tokenizer: one token per character, and a chat laid out like a play."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
SPECIALS = ("<unk>", "<eos>", "<pad>")


def make_tokenizer(text: str, max_length: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per character, which gives every corpus text back exactly.

    A byte-pair model without merges is a character model; `fuse_unk` off gives one `<unk>` for each
    unknown character, and the fusing decoder joins without separators.
    """
    symbols = [*sorted(set(text)), *SPECIALS]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False)
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE.read_text().strip(),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )

"""Conversations with random models, which speak in tokens that no tokenizer would choose."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.models.checkpoints import Checkpoints, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
WORDS = range(3, 320)
"""Every id but those of special tokens."""


def talking_checkpoint(checkpoints: Checkpoints) -> Path:
    """Return a random Llama that takes 2,048 tokens, and knows a template for conversations."""
    path = checkpoints.path("llama", max_position_embeddings=2048)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def num_shown(text: str, token_ids: Sequence[int]) -> int:
    """Count the tokens of an answer that its text shows: not those of a stop string."""
    tokenizer = make_tokenizer()
    for count in range(len(token_ids), 0, -1):
        if text.startswith(tokenizer.decode(token_ids[:count], skip_special_tokens=True)):
            return count
    return 0

"""The reference: ``transformers`` with its own attention, one prompt at a time, no cache of ours.

The reference runs prompt by prompt, in float64, with eager attention and, where there are
experts, with eager experts: the library's kernels for them take no float64.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support.models.model_families import VOCAB_SIZE, WINDOW
from tests.support.models.references import generate, reference_model

NUM_NEW = 10
"""Tokens that each prompt is continued by."""

_FIRST_ID = 3  # below are special ids


def random_ids(seed: int, num_tokens: int) -> list[int]:
    """Draw token ids, none of them special."""
    return np.random.default_rng(seed).integers(_FIRST_ID, VOCAB_SIZE, num_tokens).tolist()


_BASE = random_ids(0, 37)

PROMPTS = [
    _BASE,
    _BASE[:33] + random_ids(1, 6),
    _BASE[:19] + random_ids(2, 14),
    _BASE[:6] + random_ids(3, 20),
    random_ids(4, 25),
]
"""Strangers and relatives. With blocks of four, relatives part within a block: at tokens 33, 19
and 6; and every prompt is longer than the windows of the models."""

assert min(map(len, PROMPTS)) > 2 * WINDOW


class Reference:
    """One model of ``transformers``, and what it has said so far.

    Attributes:
        model: In float64, with eager attention and experts.
    """

    def __init__(self, path: Path) -> None:
        """Load a checkpoint."""
        self.model = reference_model(path)
        self._said: dict[tuple[int, ...], list[int]] = {}

    def generated(self, prompt: Sequence[int], eos_token_ids: Sequence[int] = ()) -> list[int]:
        """Continue a prompt greedily by ``NUM_NEW`` tokens, or up to an id that ends it."""
        known = (*eos_token_ids, -1, *prompt)
        if known not in self._said:
            whole = generate(self.model, prompt, NUM_NEW, eos_token_ids)
            self._said[known] = whole[0, len(prompt) :].tolist()
        return self._said[known]

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities of what follows each token, shape (num_tokens, vocab_size)."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.log_softmax(dim=-1)

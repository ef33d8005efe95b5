"""Log-probabilities of tokens.

They are those of the raw logits, before bias, penalties, temperature and truncation: the model's
distribution, not the sampler's. The native library computes them row by row; without it, torch
computes as many rows at once as fit.
"""

from collections.abc import Sequence
from itertools import starmap

import torch
from torch import Tensor

from ostinato.core.plan import TokenLogprob
from ostinato.errors import EngineError
from ostinato.runner.native.argmax import takes
from ostinato.runner.native.library import library
from ostinato.runner.native.sampling import row_logprobs
from ostinato.runner.sampling.truncation import top_ids

MAX_CELLS = 2**23
"""Logits per operation: several copies of them in float64 stay below half a GiB."""


def rows_at_once(vocab: int) -> int:
    """Return how many rows of logits to process per operation, at least 1."""
    return max(1, MAX_CELLS // vocab)


def token_logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_alternatives: Sequence[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return each token's log-probability and rank, and those of the most likely tokens.

    Args:
        logits: Raw logits, shape (num_rows, vocab).
        rows: Which row each token belongs to, shape (num_tokens,).
        tokens: Ids below ``vocab``, shape (num_tokens,).
        num_alternatives: Most likely tokens to add, shape (num_tokens,); the vocabulary's size
            is the most that there are.

    Returns:
        One tuple per token, itself first. Equal logits rank by id, the lowest first.

    Raises:
        EngineError: A row of logits is no distribution.

    Cost: O(num_tokens * vocab); nothing is sorted but the alternatives.
    """
    assert len(rows) == len(tokens) == len(num_alternatives)
    native = library()
    if native is not None and takes(logits):
        return _checked(row_logprobs(native, logits, rows, tokens, num_alternatives), rows)
    step = rows_at_once(logits.shape[1])
    chunks = [slice(start, start + step) for start in range(0, len(tokens), step)]
    entries = [
        entry
        for chunk in chunks
        for entry in _chunk_logprobs(logits, rows[chunk], tokens[chunk], num_alternatives[chunk])
    ]
    return _checked(entries, rows)


def _chunk_logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_alternatives: Sequence[int]
) -> list[tuple[TokenLogprob, ...] | None]:
    """Do the work of ``token_logprobs`` for as many rows as fit at once."""
    vocab = logits.shape[1]
    chosen = logits[torch.tensor(rows, device=logits.device)]  # (num_tokens, vocab)
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    sound = are_distributions(chosen)
    if not all(sound):
        return [() if is_sound else None for is_sound in sound]  # the caller refuses all of them
    own = torch.tensor(list(tokens), device=logits.device)[:, None]  # (num_tokens, 1)
    others = top_ids(chosen, min(max(num_alternatives), vocab))
    ids = torch.cat((own, others), dim=1)  # (num_tokens, 1 + num_others)
    logprobs = torch.log_softmax(chosen, dim=-1).gather(1, ids).tolist()
    ranks = _ranks(chosen, own).tolist()
    alternatives_of_rows: list[tuple[TokenLogprob, ...] | None] = []
    for line, values, rank, count in zip(
        ids.tolist(), logprobs, ranks, num_alternatives, strict=True
    ):
        # The rank of an alternative is its place behind the token itself.
        entries = zip(line, values, [rank, *range(1, len(line))], strict=True)
        alternatives_of_rows.append(tuple(starmap(TokenLogprob, list(entries)[: 1 + count])))
    return alternatives_of_rows


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the place of one token per row, 1 for the most likely, shape (num_rows,)."""
    own = logits.gather(1, tokens)
    before = torch.arange(logits.shape[1], device=logits.device) < tokens
    # A sum of booleans in 32 bits is several times faster than in the default 64.
    return 1 + ((logits > own) | ((logits == own) & before)).sum(-1, dtype=torch.int32)


def are_distributions(logits: Tensor) -> list[bool]:
    """Return for each row whether its softmax is one; else it is NaN throughout."""
    fine: list[bool] = logits.amax(-1).isfinite().tolist()
    return fine


def _checked(
    entries: Sequence[tuple[TokenLogprob, ...] | None], rows: Sequence[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Refuse rows that are no distribution."""
    for row, entry in zip(rows, entries, strict=True):
        if entry is None:
            raise EngineError(
                f"row {row} of the logits is no distribution: it contains NaN or +inf, or is -inf "
                "throughout, so no log-probability can be given; a wider dtype may help"
            )
    return tuple(entry for entry in entries if entry is not None)

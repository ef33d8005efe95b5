"""Changes the logits before a token is chosen.

In this order, which is that of vLLM and of Hugging Face's logits processors:

1. ``logit_bias`` is added;
2. ``repetition_penalty`` divides (below zero: multiplies) the logit of each token that occurs in
   the prompt or the output (Keskar et al., CTRL, arXiv 1909.05858, section 4.1);
3. ``frequency_penalty`` is subtracted for each occurrence of a token in the output, and
   ``presence_penalty`` once (as OpenAI's API defines them);
4. ids outside ``allowed_token_ids``, and those that would complete one of ``bad_words``, become
   -inf;
5. so do banned ids, and those that the constraint of a structured output does not allow.

An edit changes few of the logits, so each kind is one indexed operation on (row, id, value) of the
whole batch; the logits are copied once.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampleTask

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Cells:
    """Some cells of the logits, each shape (num_cells,).

    Attributes:
        rows: Row of each cell.
        ids: Token id of each cell.
        counts: How often the token occurs in that row's text.
    """

    rows: Ints
    ids: Ints
    counts: Ints


def edit_logits(logits: Tensor, tasks: Sequence[SampleTask]) -> Tensor:
    """Apply bias, penalties and bans.

    Args:
        logits: Raw logits, shape (num_rows, vocab).
        tasks: One per row.

    Returns:
        Edited logits in float32 or wider, shape (num_rows, vocab); ``logits`` itself where no
        row asks for an edit.

    Effects: none; the raw logits stay as they are for log-probabilities.
    Cost: one copy of the logits, O(t log t) for the t tokens of the rows with penalties.
    """
    if not any(asks_for_edits(task) for task in tasks):
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    _add_bias(edited, tasks)
    _penalise_repetition(edited, tasks)
    _penalise_output(edited, tasks)
    _keep_allowed(edited, tasks)
    _ban(edited, tasks)
    _keep_constraint(edited, tasks)
    return edited


def asks_for_edits(task: SampleTask) -> bool:
    """Return whether a row's logits change before its token is chosen."""
    params = task.params
    return bool(
        task.banned
        or task.constraint
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words_ids
        or params.allowed_token_ids is not None
    )


def _add_bias(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Add each row's ``logit_bias``."""
    triples = [
        (row, token, bias)
        for row, task in enumerate(tasks)
        for token, bias in task.params.logit_bias.items()
    ]
    if not triples:
        return
    rows, ids, biases = zip(*triples, strict=True)
    assert max(ids) < logits.shape[1], "admission refuses biased ids outside the vocabulary"
    where = _index(logits, rows, ids)
    logits[where] += _values(logits, biases)


def _penalise_repetition(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output."""
    rows = [i for i, task in enumerate(tasks) if task.params.repetition_penalty != 1.0]
    texts = [(i, text) for i in rows for text in (tasks[i].prompt, tasks[i].output)]
    if not texts:
        return
    cells = _count_tokens(texts, logits.shape[1])
    where = _index(logits, cells.rows, cells.ids)
    penalties = _per_cell(logits, cells, [t.params.repetition_penalty for t in tasks])
    seen = logits[where]
    logits[where] = torch.where(seen > 0, seen / penalties, seen * penalties)


def _penalise_output(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Subtract the penalties of tokens in the output, by presence and by count."""
    texts = [
        (i, task.output)
        for i, task in enumerate(tasks)
        if task.params.frequency_penalty != 0.0 or task.params.presence_penalty != 0.0
    ]
    if not texts:
        return
    cells = _count_tokens(texts, logits.shape[1])
    where = _index(logits, cells.rows, cells.ids)
    frequency = _per_cell(logits, cells, [t.params.frequency_penalty for t in tasks])
    presence = _per_cell(logits, cells, [t.params.presence_penalty for t in tasks])
    logits[where] -= frequency * _values(logits, cells.counts) + presence


def _keep_allowed(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Mask all ids but a row's ``allowed_token_ids``."""
    for row, task in zip(logits, tasks, strict=True):
        if task.params.allowed_token_ids is not None:
            ids = torch.tensor(task.params.allowed_token_ids, device=logits.device)
            allowed = row[ids]
            row.fill_(float("-inf"))
            row[ids] = allowed


def completed_words(task: SampleTask) -> list[int]:
    """Return the ids that would complete one of a row's ``bad_words``."""
    output = task.output
    return [
        last
        for *first, last in task.params.bad_words_ids
        if len(first) <= len(output) and output[len(output) - len(first) :].tolist() == first
    ]


def _ban(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Mask banned ids; ids outside the vocabulary are ignored."""
    vocab = logits.shape[1]
    pairs = [
        (row, token)
        for row, task in enumerate(tasks)
        for token in (*task.banned, *completed_words(task))
        if token < vocab
    ]
    if pairs:
        rows, ids = zip(*pairs, strict=True)
        logits[_index(logits, rows, ids)] = float("-inf")


def _keep_constraint(logits: Tensor, tasks: Sequence[SampleTask]) -> None:
    """Mask the ids that constraints do not allow, in place; each row is read and written once."""
    rows = [row for row, task in enumerate(tasks) if task.constraint is not None]
    if not rows:
        return
    vocab = logits.shape[1]
    masks = np.stack(
        [t.constraint.mask()[: -(-vocab // 8)] for t in tasks if t.constraint is not None]
    )
    bits = np.unpackbits(~masks, axis=1, count=vocab, bitorder="little")
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)  # (num_forms, vocab)
    for row, ids in zip(rows, forbidden, strict=True):
        logits[row].masked_fill_(ids, float("-inf"))


def _count_tokens(texts: Iterable[tuple[int, "array[int]"]], vocab: int) -> _Cells:
    """Count each row's tokens, without ids that have no logit, such as those of images."""
    keys: list[Ints] = []
    for row, text in texts:
        ids = np.array(text, dtype=np.int64)
        keys.append(ids[ids < vocab] + row * vocab)
    distinct, counts = np.unique(np.concatenate(keys), return_counts=True)
    return _Cells(distinct // vocab, distinct % vocab, counts)


def _index(
    logits: Tensor, rows: Sequence[int] | Ints, ids: Sequence[int] | Ints
) -> tuple[Tensor, Tensor]:
    """Return (row, id) pairs as tensors on the device of the logits."""
    return (
        torch.as_tensor(rows, dtype=torch.int64, device=logits.device),
        torch.as_tensor(ids, dtype=torch.int64, device=logits.device),
    )


def _values(logits: Tensor, values: Sequence[float] | np.ndarray[Any, Any]) -> Tensor:
    """Return numbers with the device and the dtype of the logits."""
    return torch.as_tensor(values, dtype=logits.dtype, device=logits.device)


def _per_cell(logits: Tensor, cells: _Cells, by_row: Sequence[float]) -> Tensor:
    """Return the row's number for each cell, shape (num_cells,)."""
    return _values(logits, np.asarray(by_row, dtype=np.float64)[cells.rows])

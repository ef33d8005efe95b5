"""Changes the logits before a token is chosen.

In this order, which is that of vLLM and of Hugging Face's logits processors:

1. ``logit_bias`` is added;
2. ``repetition_penalty`` divides (below zero: multiplies) the logit of each token that occurs in
   the prompt or the output (Keskar et al., CTRL, arXiv 1909.05858, section 4.1);
3. ``frequency_penalty`` is subtracted for each occurrence of a token in the output, and
   ``presence_penalty`` once (as OpenAI's API defines them);
4. ids outside ``allowed_token_ids``, those that would complete one of ``bad_words``, banned ids,
   stop ids below ``min_tokens``, and those that the constraint of a structured output does not
   allow become -inf.

The native library does this row by row (``native/src/sampling/edits.h``); what is here serves
where it cannot run. Each kind of edit is one indexed operation on (row, id, value) of the whole
batch; the logits are copied once.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampleTask
from ostinato.runner.token_lists import TokenLists, banned_ids, masks_of

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


def edit_logits(logits: Tensor, tasks: Sequence[SampleTask], lists: Sequence[TokenLists]) -> Tensor:
    """Apply bias, penalties and bans.

    Args:
        logits: Raw logits, shape (num_rows, vocab).
        tasks: One per row.
        lists: The prepared lists of each task's parameters.

    Returns:
        Edited logits in float32 or wider, shape (num_rows, vocab); ``logits`` itself where no
        row asks for an edit.

    Effects: none; the raw logits stay as they are for log-probabilities.
    Cost: one copy of the logits, O(t log t) for the t tokens of the rows with penalties.
    """
    if not any(asks_for_edits(task) for task in tasks):
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    _add_bias(edited, lists)
    _penalise_repetition(edited, tasks)
    _penalise_output(edited, tasks)
    _keep_masks(edited, tasks, lists)
    _ban(edited, tasks, lists)
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
        or (params.stop_token_ids and len(task.output) < params.min_tokens)
    )


def _add_bias(logits: Tensor, lists: Sequence[TokenLists]) -> None:
    """Add each row's ``logit_bias``."""
    rows = np.repeat(np.arange(len(lists)), [len(each.bias_ids) for each in lists])
    if len(rows):
        ids, biases = (
            np.concatenate(arrays)
            for arrays in zip(*((each.bias_ids, each.biases) for each in lists), strict=True)
        )
        logits[_index(logits, rows, ids)] += _values(logits, biases)


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


def _keep_masks(logits: Tensor, tasks: Sequence[SampleTask], lists: Sequence[TokenLists]) -> None:
    """Mask the ids that a row's masks do not allow, in place."""
    vocab = logits.shape[1]
    for row, task, prepared in zip(logits, tasks, lists, strict=True):
        for mask in masks_of(task, prepared):
            bits = np.unpackbits(~mask[: -(-vocab // 8)], count=vocab, bitorder="little")
            row.masked_fill_(torch.from_numpy(bits.view(np.bool_)).to(row.device), -torch.inf)


def _ban(logits: Tensor, tasks: Sequence[SampleTask], lists: Sequence[TokenLists]) -> None:
    """Mask banned ids; ids outside the vocabulary are ignored."""
    banned = [banned_ids(task, prepared) for task, prepared in zip(tasks, lists, strict=True)]
    rows = np.repeat(np.arange(len(tasks)), [len(ids) for ids in banned])
    if len(rows):
        ids = np.concatenate(banned)
        inside = ids < logits.shape[1]
        logits[_index(logits, rows[inside], ids[inside])] = -torch.inf


def _count_tokens(texts: Iterable[tuple[int, "array[int]"]], vocab: int) -> _Cells:
    """Count each row's tokens, without ids that have no logit, such as those of images."""
    keys: list[Ints] = []
    for row, text in texts:
        ids = np.array(text, dtype=np.int64)
        keys.append(ids[ids < vocab] + row * vocab)
    distinct, counts = np.unique(np.concatenate(keys), return_counts=True)
    return _Cells(distinct // vocab, distinct % vocab, counts)


def _index(logits: Tensor, rows: Ints, ids: Ints) -> tuple[Tensor, Tensor]:
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

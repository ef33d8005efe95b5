"""Sampling and log-probabilities in the native library: one row of logits at a time.

Rows are computed side by side on torch's threads. Nothing is sorted but the alternatives of
log-probabilities, and a row's results depend on that row alone, on every instruction set.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.core.plan import SampleTask, TokenLogprob
from ostinato.runner.native.ctypes_api import DTYPES, floats, int32s, int64s, pointers
from ostinato.runner.token_lists import TokenLists, banned_ids, masks_of


class _SampleRow(ctypes.Structure):
    """``ost_sample_row``."""

    _fields_ = (
        *pointers("bias_ids", "biases", "prompt", "output"),
        ("masks", ctypes.c_void_p * 3),
        *pointers("banned", "uniforms", "tokens"),
        *int64s("num_biases", "num_prompt", "num_output", "num_banned", "num_tokens"),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *int32s("top_k"),
        *floats("repetition", "frequency", "presence"),
    )


class _Logprobs(ctypes.Structure):
    """``ost_logprobs``."""

    _fields_ = (
        *int64s("row"),
        *pointers("tokens", "values", "ranks", "alternatives"),
        *int64s("num_tokens", "num_alternatives"),
    )


class _Sampling(ctypes.Structure):
    """``ost_sampling``, with the fields of its matrix."""

    _fields_ = (
        *pointers("logits"),
        *int64s("stride"),
        *pointers("rows", "logprobs"),
        *int64s("num_rows"),
        *int32s("width", "dtype", "num_threads"),
    )


@dataclass(frozen=True, slots=True)
class Draws:
    """What was sampled from some rows.

    Attributes:
        ids: One id per row and seed; -1 where nothing can be sampled.
        logprobs: One tuple per row and seed, the sampled token first; None for a row that asks for
            none, or whose logits are no distribution.
    """

    ids: list[list[int]]
    logprobs: list[list[tuple[TokenLogprob, ...]] | None]


def sample_rows(
    native: ctypes.CDLL,
    logits: Tensor,
    tasks: Sequence[SampleTask],
    lists: Sequence[TokenLists],
    numbers: Sequence[Sequence[float]],
) -> Draws:
    """Sample rows.

    Args:
        native: The library.
        logits: Shape (num_rows, vocab); ``argmax.takes`` is true for them.
        tasks: One per row.
        lists: The prepared lists of each task's parameters.
        numbers: Each row's uniform random numbers, one per seed.
    """
    assert len(logits) == len(tasks) == len(lists) == len(numbers)
    vocab = logits.shape[1]
    uniforms = np.array([number for row in numbers for number in row], dtype=np.float64)
    tokens = np.empty(len(uniforms), dtype=np.int64)
    rows, entries = (_SampleRow * len(tasks))(), _Entries(len(tasks))
    alive: list[object] = []  # until the call returns
    place = 0
    for index, (row, task, prepared) in enumerate(zip(rows, tasks, lists, strict=True)):
        row.tokens, row.uniforms = (_address(each, place) for each in (tokens, uniforms))
        row.num_tokens = len(task.seeds)
        _fill_parameters(row, task)
        _fill_lists(row, task, prepared, vocab, alive)
        if task.params.logprobs is not None:
            count = min(task.params.logprobs, vocab)
            entries.add(index, row.tokens, len(task.seeds), count)
        place += len(task.seeds)
    logprobs = entries.records if entries.slices else None
    _call(native, logits, rows, logprobs)
    flat = iter(tokens.tolist())
    ids = [[next(flat) for _ in task.seeds] for task in tasks]
    return Draws(ids, [entries.of(index, row) for index, row in enumerate(ids)])


def row_logprobs(
    native: ctypes.CDLL,
    logits: Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    num_alternatives: Sequence[int],
) -> list[tuple[TokenLogprob, ...] | None]:
    """Return log-probabilities of tokens, itself and then alternatives; None for no distribution.

    Args:
        native: The library.
        logits: Shape (num_rows, vocab); ``argmax.takes`` is true for them.
        rows: The row of each token.
        tokens: Ids below ``vocab``.
        num_alternatives: Most likely tokens to add to each.
    """
    vocab = logits.shape[1]
    ids = np.fromiter(tokens, np.int64, len(tokens))
    entries = _Entries(len(rows))
    for index, (row, count) in enumerate(zip(rows, num_alternatives, strict=True)):
        assert 0 <= row < len(logits) and 0 <= ids[index] < vocab, (row, tokens[index])
        entries.add(index, _address(ids, index), 1, min(count, vocab), row)
    _call(native, logits, None, entries.records)
    answers = (entries.of(index, [token]) for index, token in enumerate(ids.tolist()))
    return [None if lines is None else lines[0] for lines in answers]


class _Entries:
    """Log-probabilities to compute, by row."""

    def __init__(self, num_rows: int) -> None:
        self.records = (_Logprobs * num_rows)()
        self.slices: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}

    def add(self, index: int, tokens: int, num_tokens: int, count: int, row: int = 0) -> None:
        """Ask for ``num_tokens`` tokens and ``count`` alternatives."""
        values = np.empty(num_tokens + count)
        whole = np.empty(num_tokens + count, dtype=np.int64)  # ranks, then ids
        whole[0] = 0
        self.slices[index] = values, whole
        self.records[index] = _Logprobs(
            row,
            tokens,
            _address(values),
            _address(whole),
            _address(whole, num_tokens),
            num_tokens,
            count,
        )

    def of(self, index: int, tokens: Sequence[int]) -> list[tuple[TokenLogprob, ...]] | None:
        """Return the log-probabilities of a row's tokens; None if there are none."""
        if index not in self.slices or self.slices[index][1][0] == 0:
            return None
        values, whole = (part.tolist() for part in self.slices[index])
        size = len(tokens)
        others = tuple(map(TokenLogprob, whole[size:], values[size:], range(1, len(values) + 1)))
        return [
            (TokenLogprob(token, value, rank), *others)
            for token, value, rank in zip(tokens, values, whole, strict=False)
        ]


def _fill_parameters(row: _SampleRow, task: SampleTask) -> None:
    params = task.params
    row.temperature, row.top_p, row.min_p = params.temperature, params.top_p, params.min_p
    row.top_k = min(params.top_k, 2**31 - 1)
    row.repetition = params.repetition_penalty
    row.frequency, row.presence = params.frequency_penalty, params.presence_penalty
    if params.repetition_penalty != 1.0:
        row.prompt, row.num_prompt = task.prompt.buffer_info()
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        row.output, row.num_output = task.output.buffer_info()


def _fill_lists(
    row: _SampleRow, task: SampleTask, lists: TokenLists, vocab: int, alive: list[object]
) -> None:
    """Point a row to its lists and masks; what is made here is added to ``alive``."""
    if len(lists.bias_ids):
        row.bias_ids, row.num_biases = _address(lists.bias_ids), len(lists.bias_ids)
        row.biases = _address(lists.biases)
    masks = masks_of(task, lists)
    for place, mask in enumerate(masks):
        assert mask.dtype == np.uint8 and mask.flags.c_contiguous and 8 * len(mask) >= vocab
        row.masks[place] = _address(mask)
    banned = banned_ids(task, lists)
    if len(banned):
        row.banned, row.num_banned = _address(banned), len(banned)
    alive += (*masks, banned)


def _address(numbers: NDArray[Any], place: int = 0) -> int:
    return numbers.ctypes.data + place * numbers.itemsize


def _call(native: ctypes.CDLL, logits: Tensor, rows: Any, logprobs: Any) -> None:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    op = _Sampling(
        logits.data_ptr(),
        logits.stride(0),
        None if rows is None else ctypes.addressof(rows),
        None if logprobs is None else ctypes.addressof(logprobs),
        len(logprobs if rows is None else rows),
        logits.shape[1],
        DTYPES[logits.dtype],
        torch.get_num_threads(),
    )
    native.ost_sample(ctypes.byref(op))

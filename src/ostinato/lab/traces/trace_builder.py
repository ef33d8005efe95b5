"""Packs requests with named blocks into compact arrays.

A trace of a gigabyte lists a hundred million block names: integers of any size, or strings. They
are numbered as they are read, so that 4 bytes are kept per name, and per *distinct* name 8 (16 if
the names are large)::

    names in the file      [881, 12, 7]  [881, 12, 40]  [881, 12, 7, 3]
    numbers                 0    1   2    0    1   3     0    1   2  4

Names are compared by 64 bits; strings and integers beyond that by a hash of 64 bits. An id has one
parent wherever it appears: where a name has several, it becomes several blocks.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ostinato.errors import BrokenTrace
from ostinato.lab.log.lines import BrokenLine
from ostinato.lab.traces.block_trace import BlockRequest, BlockTrace

NAMES_PER_BATCH = 1 << 20
_MASK = 2**64 - 1
_NONE = 2**32 - 1
_SMALL = 1 << 26
"""Names below it index a table: public traces renumber their hashes from 0."""

Ids = npt.NDArray[np.uint32]


class TraceBuilder:
    """Requests of a trace, added one by one in any order of arrival."""

    def __init__(self, requests: Iterable[BlockRequest] = ()) -> None:
        """Add the first requests."""
        self.arrivals = array("d")
        # Blocks, prompt tokens, output tokens, and blocks of the answer, of each request.
        self._columns = tuple(array("q") for _ in range(4))
        self._names = array("Q")
        self._ids: list[Ids] = []
        self._table = _NameTable()
        self._batch_begins = 0
        for request in requests:
            self.add(request)

    def add(self, request: BlockRequest) -> None:
        """Add a request; its arrival is in the trace's own unit."""
        before = len(self._names)
        try:
            self._names.extend(request.blocks)  # type: ignore[arg-type]  # what is no integer raises
        except (TypeError, OverflowError):
            del self._names[before:]
            self._names.extend(hash(name) & _MASK for name in request.blocks)
        self.arrivals.append(request.arrival_s)
        lengths = len(request.blocks), request.input_tokens, request.output_tokens
        for column, length in zip(self._columns, (*lengths, request.answer_blocks), strict=True):
            column.append(length)
        if len(self._names) >= NAMES_PER_BATCH:
            self._number_names()

    def build(
        self,
        name: str,
        block_tokens: int,
        broken: tuple[BrokenLine, ...] = (),
        units_per_s: float = 1.0,
    ) -> BlockTrace:
        """Return the trace, in the order of arrival.

        Args:
            name: Name of the file.
            block_tokens: Tokens per block.
            broken: Lines that were left out.
            units_per_s: Units per second of the arrivals: 1000 for milliseconds.

        Raises:
            BrokenTrace: There is no request, or one has more full blocks than tokens for them.
        """
        if not self.arrivals:
            raise BrokenTrace(f"{name}: there is no request in it")
        self._number_names()
        columns = np.stack([np.array(column, np.int64) for column in self._columns])
        arrivals, offsets = np.array(self.arrivals, np.float64), _offsets(columns[0])
        ids = self._all_ids(int(offsets[-1]))
        _refuse_too_many_blocks(name, block_tokens, *columns[:3])
        order = np.argsort(arrivals, kind="stable")
        is_moved = bool((np.diff(order) < 0).any())
        if is_moved:
            ids = np.concatenate([ids[offsets[row] : offsets[row + 1]] for row in order])
            columns, arrivals = columns[:, order], arrivals[order]
            offsets = _offsets(columns[0])
        if not self._table.is_chained:
            ids = _with_one_parent(ids, offsets)
        if is_moved or not self._table.is_chained:
            ids = _by_first_appearance(ids)
        lengths, inputs, outputs, answers = columns
        at_s = (arrivals - arrivals[0]) / units_per_s
        prompt_blocks = lengths - answers
        return BlockTrace(
            name, block_tokens, at_s, inputs, outputs, offsets, ids, prompt_blocks, broken
        )

    def _all_ids(self, num_ids: int) -> Ids:
        """Join the batches, each freed as it is copied."""
        ids = np.empty(num_ids, np.uint32)
        end = num_ids
        while self._ids:
            batch = self._ids.pop()
            ids[end - len(batch) : end] = batch
            end -= len(batch)
        return ids

    def _number_names(self) -> None:
        lengths = np.array(self._columns[0][self._batch_begins :], np.int64)
        self._ids.append(self._table.number(np.array(self._names, np.uint64), lengths))
        self._names = array("Q")
        self._batch_begins = len(self.arrivals)


class _NameTable:
    """The number and the parent of each name: by place for small names, sorted for others."""

    def __init__(self) -> None:
        self.is_chained = True  # every name has one parent
        self._small = np.zeros(0, np.uint32)  # numbers by name
        self._large = np.zeros(0, np.uint64)  # names in order
        self._numbers = np.zeros(0, np.uint32)  # of the large names
        self._parents = np.zeros(0, np.uint32)  # by number

    def number(self, names: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]) -> Ids:
        """Number a batch of rows, new names in the order in which they appear."""
        if not len(names):
            return np.zeros(0, np.uint32)
        distinct, firsts, inverse = np.unique(names, return_index=True, return_inverse=True)
        num_small = int(np.searchsorted(distinct, _SMALL))
        small, large = distinct[:num_small], distinct[num_small:]
        if num_small and small[-1] >= len(self._small):
            missing = int(small[-1]) + 1 - len(self._small)
            self._small = np.concatenate((self._small, np.full(missing, _NONE, np.uint32)))
        places = np.searchsorted(self._large, large)
        numbers = np.full(len(distinct), _NONE, np.uint32)
        numbers[:num_small] = self._small[small]
        known = places < len(self._large)
        known[known] = self._large[places[known]] == large[known]
        numbers[num_small:][known] = self._numbers[places[known]]
        fresh = np.flatnonzero(numbers == _NONE)
        fresh = fresh[np.argsort(firsts[fresh])]
        begin = len(self._parents)
        numbers[fresh] = np.arange(begin, begin + len(fresh), dtype=np.uint32)
        self._small[small] = numbers[:num_small]
        self._large = np.insert(self._large, places[~known], large[~known])
        self._numbers = np.insert(self._numbers, places[~known], numbers[num_small:][~known])
        ids: Ids = numbers[inverse.ravel()]
        self._note_parents(ids, lengths, firsts[fresh])
        return ids

    def _note_parents(
        self, ids: Ids, lengths: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64]
    ) -> None:
        parents = np.concatenate((np.array([_NONE], np.uint32), ids[:-1]))
        starts = _offsets(lengths)[:-1][lengths > 0]
        parents[starts] = _NONE
        self._parents = np.concatenate((self._parents, parents[firsts]))
        self.is_chained = self.is_chained and bool((self._parents[ids] == parents).all())


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))


def _refuse_too_many_blocks(
    name: str,
    block_tokens: int,
    lengths: npt.NDArray[np.int64],
    inputs: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
) -> None:
    wrong = np.flatnonzero(lengths * block_tokens > inputs + outputs)
    if len(wrong):
        row = wrong[0]
        raise BrokenTrace(
            f"{name}: a request of {inputs[row]} + {outputs[row]} tokens cannot have "
            f"{lengths[row]} full blocks of {block_tokens}"
        )


def _with_one_parent(ids: Ids, offsets: npt.NDArray[np.int64]) -> Ids:
    """Give a name under several parents a number under each, one depth of all rows at a time."""
    split, lengths = np.empty_like(ids), np.diff(offsets)
    parents = np.zeros(len(lengths), np.uint64)
    used = 0
    for depth in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > depth)
        places = offsets[rows] + depth
        keys = parents[rows] << np.uint64(32) | ids[places]
        distinct, inverse = np.unique(keys, return_inverse=True)
        numbers = inverse.ravel() + used
        split[places] = numbers
        parents[rows] = numbers
        used += len(distinct)
    return split


def _by_first_appearance(ids: Ids) -> Ids:
    distinct, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(distinct), np.uint32)
    numbers[np.argsort(firsts)] = np.arange(len(distinct), dtype=np.uint32)
    renumbered: Ids = numbers[inverse.ravel()]
    return renumbered

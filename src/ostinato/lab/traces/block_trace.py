"""Traffic as block ids instead of tokens.

Public traces list, for each request, its arrival, its lengths and the ids of its full blocks. An
id names a block *and all before it*, so two requests share exactly the ids that they begin with
alike::

    request 0    1 2 3 4        1 is the parent of 2, 2 that of 3 ...
    request 1    1 2 5          shares two blocks with request 0
    request 2    1 2 3 4 6 7    continues request 0

A row of ids is a row of tokens for a cache with blocks of one token, which makes replays both exact
and fast.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

import numpy as np
import numpy.typing as npt

from ostinato.errors import BrokenTrace
from ostinato.lab.log.lines import BrokenLine

Numbers = npt.NDArray[np.int64]

MAX_TOKENS = 100_000_000
"""Maximum tokens of a prompt or an answer; more are considered an error in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """Requests as rows of block ids, in the order of their arrival.

    Attributes:
        name: Name of the file.
        block_tokens: Tokens per block.
        arrival_s: Seconds since the first arrival, shape (num_requests,), never falling.
        input_tokens: Lengths of the prompts, shape (num_requests,).
        output_tokens: Lengths of the answers, shape (num_requests,).
        offsets: Start of each request's ids, shape (num_requests + 1,).
        ids: Ids of full blocks, each with one parent, shape (num_blocks,), ``uint32``.
        prompt_blocks: How many of a request's ids are of its prompt, shape (num_requests,); those
            after them are of its answer, where a trace knows them.
        broken: Lines of the file that were skipped.
        token_bytes: KV of one token, if the trace has its model; else None.
        notes: Assumptions made in reading the file.
    """

    name: str
    block_tokens: int
    arrival_s: npt.NDArray[np.float64]
    input_tokens: Numbers
    output_tokens: Numbers
    offsets: Numbers
    ids: npt.NDArray[np.uint32]
    prompt_blocks: Numbers
    broken: tuple[BrokenLine, ...] = ()
    token_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.input_tokens)

    @property
    def num_lookups(self) -> int:
        """Blocks over all requests."""
        return len(self.ids)

    @property
    def num_distinct(self) -> int:
        """Number of distinct blocks; a cache of this size never evicts."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def total_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.input_tokens.sum())

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def path(self, request: int) -> npt.NDArray[np.uint32]:
        """Ids of one request, shape (num_blocks of it,)."""
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    def paths(self) -> list[list[int]]:
        """Ids of all requests, as Python integers."""
        bounds, ids = self.offsets.tolist(), self.ids.tolist()
        return [ids[a:b] for a, b in pairwise(bounds)]

    def first(self, num_requests: int) -> "BlockTrace":
        """Return the trace of only the first requests."""
        return self.part(0, min(num_requests, len(self)))

    def part(self, begin: int, end: int) -> "BlockTrace":
        """Return the trace of the requests from ``begin`` up to ``end``, at the same times."""
        offsets = self.offsets[begin : end + 1]
        return replace(
            self,
            arrival_s=self.arrival_s[begin:end],
            input_tokens=self.input_tokens[begin:end],
            output_tokens=self.output_tokens[begin:end],
            offsets=offsets - offsets[0],
            ids=self.ids[offsets[0] : offsets[-1]],
            prompt_blocks=self.prompt_blocks[begin:end],
        )


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request of a trace that is being built.

    Attributes:
        arrival_s: On the trace's own clock; seconds, unless all are scaled when it is built.
        input_tokens: Length of the prompt.
        output_tokens: Length of the answer.
        blocks: Names of its full blocks, of any type; equal names under equal parents are the same
            block.
        answer_blocks: Number of them that belong to the answer.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[Hashable]
    answer_blocks: int = 0

    def __post_init__(self) -> None:
        """Check the lengths and the time.

        Raises:
            BrokenTrace: A length is out of range, or the arrival is not a time.
        """
        for what, length in (("prompt", self.input_tokens), ("answer", self.output_tokens)):
            if not 0 <= length <= MAX_TOKENS:
                raise BrokenTrace(f"a {what} of {length} tokens: must be from 0 to {MAX_TOKENS:,}")
        if not isfinite(self.arrival_s):
            raise BrokenTrace(f"{self.arrival_s} is not an arrival time")

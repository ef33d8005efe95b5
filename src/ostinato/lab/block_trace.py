"""What is known of traffic whose tokens nobody wrote down: which blocks each request began with.

Public traces list, for each request, its arrival, its lengths and the ids of its full blocks. An
id names a block *and all before it*, so two requests share exactly the ids that they begin with
alike::

    request 0    1 2 3 4        1 is the parent of 2, 2 that of 3 ...
    request 1    1 2 5          shares two blocks with request 0
    request 2    1 2 3 4 6 7    goes on where request 0 ended

A row of ids is a row of tokens for a cache with blocks of one token; that is what makes its
replay exact and fast at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import numpy as np
import numpy.typing as npt

from ostinato.core.errors import BrokenTrace
from ostinato.lab.lines import BrokenLine

Numbers = npt.NDArray[np.int64]

MOST_TOKENS = 100_000_000
"""Tokens of a prompt or an answer; more are taken for a mistake of whoever wrote them down."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTrace:
    """Requests as rows of block ids, in the order of their arrival.

    Attributes:
        name: Of the file.
        block_tokens: Tokens per block.
        arrival_s: Seconds since the first arrival, shape (num_requests,), never falling.
        input_tokens: Lengths of the prompts, shape (num_requests,).
        output_tokens: Lengths of the answers, shape (num_requests,).
        offsets: Where each request's ids begin, shape (num_requests + 1,).
        ids: Of the full blocks, each with one parent, shape (num_blocks,), ``uint32``.
        prompt_blocks: How many of a request's ids are of its prompt, shape (num_requests,); those
            behind are of its answer, where a trace knows them.
        broken: Lines of the file that were left out.
        token_bytes: KV of one token, where the trace knows its model; else None.
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

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.input_tokens)

    @property
    def num_lookups(self) -> int:
        """Blocks over all requests."""
        return len(self.ids)

    @property
    def num_distinct(self) -> int:
        """Distinct blocks: a cache of so many never evicts."""
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
        """Return the trace of the first requests alone."""
        n = min(num_requests, len(self))
        return BlockTrace(
            self.name,
            self.block_tokens,
            self.arrival_s[:n],
            self.input_tokens[:n],
            self.output_tokens[:n],
            self.offsets[: n + 1],
            self.ids[: self.offsets[n]],
            self.prompt_blocks[:n],
            self.broken,
            self.token_bytes,
        )


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request of a trace, before it is one of many.

    Attributes:
        arrival_s: Seconds on the trace's own clock.
        input_tokens: Length of the prompt.
        output_tokens: Length of the answer.
        blocks: Names of its full blocks, whatever they are; equal names under equal parents are
            the same block.
        answer_blocks: How many of them belong to the answer.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[object, ...]
    answer_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuse what no traffic has.

        Raises:
            BrokenTrace: A length is out of range, or the arrival is no time.
        """
        for what, length in (("prompt", self.input_tokens), ("answer", self.output_tokens)):
            if not 0 <= length <= MOST_TOKENS:
                raise BrokenTrace(f"a {what} of {length} tokens: 0 to {MOST_TOKENS:,} can be")
        if not isfinite(self.arrival_s):
            raise BrokenTrace(f"{self.arrival_s} is no time of arrival")


def make_block_trace(
    name: str,
    block_tokens: int,
    requests: Iterable[BlockRequest],
    broken: tuple[BrokenLine, ...] = (),
) -> BlockTrace:
    """Put requests together, in the order of their arrival.

    Blocks are numbered by first appearance, each under its parent, so that an id has one parent
    whatever the names were.

    Raises:
        BrokenTrace: There is no request, or one has more full blocks than tokens for them.
    """
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    if not ordered:
        raise BrokenTrace(f"{name}: there is no request in it")
    known: dict[tuple[int, object], int] = {}
    ids: list[int] = []
    offsets = [0]
    for request in ordered:
        if len(request.blocks) * block_tokens > request.input_tokens + request.output_tokens:
            raise BrokenTrace(
                f"{name}: a request of {request.input_tokens} + {request.output_tokens} tokens "
                f"cannot have {len(request.blocks)} full blocks of {block_tokens}"
            )
        parent = -1
        for block in request.blocks:
            parent = known.setdefault((parent, block), len(known))
            ids.append(parent)
        offsets.append(len(ids))
    prompt_blocks = [len(r.blocks) - r.answer_blocks for r in ordered]
    return BlockTrace(
        name,
        block_tokens,
        np.array([r.arrival_s - ordered[0].arrival_s for r in ordered], np.float64),
        np.array([r.input_tokens for r in ordered], np.int64),
        np.array([r.output_tokens for r in ordered], np.int64),
        np.array(offsets, np.int64),
        np.array(ids, np.uint32),
        np.array(prompt_blocks, np.int64),
        broken,
    )

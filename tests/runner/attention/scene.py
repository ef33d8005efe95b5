"""A store with cached tokens and a step that brings new ones, for any backend.

The store is NaN wherever the step may not look, so that a look shows.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ostinato.core.ids import SequenceId
from ostinato.core.plan import CopyRun, ScheduledSequence, StepPlan
from ostinato.runner.attention.backend import AttentionBackend, AttentionStyle
from ostinato.runner.inputs import AttentionMetadata, build_inputs
from ostinato.runner.kv.kv_codes import decode, encode
from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape
from tests.runner.attention.reference import attend_sequence


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, and the lengths of the sequences of one step."""

    sequences: tuple[tuple[int, int], ...]
    """Cached and new tokens of each."""
    likes: tuple[tuple[int, int], ...] = ()
    """For each sequence, an earlier one and how many cached blocks it shares with that."""
    num_kv_heads: int = 1
    group: int = 1
    key_dim: int = 4
    value_dim: int = 4
    block_size: int = 4


TREE = Shape(
    # A system prompt of 8 blocks for all five; a document of 4 more for the first three.
    sequences=((200, 1), (192, 1), (196, 5), (136, 1), (156, 1)),
    likes=((0, 0), (0, 12), (0, 12), (0, 8), (0, 8)),
    group=2,
    block_size=16,
)


class Scene:
    """A store with cached tokens, and a step that brings new ones."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        backend: AttentionBackend,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.backend = backend
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)
        size = shape.block_size
        counts = [-(-sum(lengths) // size) for lengths in shape.sequences]
        num_blocks = sum(counts) + 2
        scattered = iter(rng.permutation(num_blocks).tolist())
        self.tables = [[next(scattered) for _ in range(count)] for count in counts]
        layer = LayerKV(shape.num_kv_heads, shape.key_dim, shape.value_dim)
        self.store = backend.new_store(
            StoreShape(KVSpec((layer,)), num_blocks, size, kv_dtype or dtype, torch.device("cpu"))
        )
        self.whole = [
            (
                torch.randn(sum(n), shape.num_kv_heads, shape.key_dim, generator=draw).to(dtype),
                torch.randn(sum(n), shape.num_kv_heads, shape.value_dim, generator=draw).to(dtype),
            )
            for n in shape.sequences
        ]
        num_new = sum(new for _, new in shape.sequences)
        num_heads = shape.num_kv_heads * shape.group
        self.share()
        self.queries = torch.randn(num_new, num_heads, shape.key_dim, generator=draw).to(dtype)
        self.poison()
        self.fill()

    def fill(self) -> None:
        """Store the cached tokens."""
        for (cached, _), table, (keys, values) in zip(
            self.shape.sequences, self.tables, self.whole, strict=True
        ):
            self.store.write(0, keys[:cached], values[:cached], self.slots(table, cached))

    def share(self) -> None:
        """Let sequences begin as earlier ones do, with the same blocks."""
        size = self.shape.block_size
        for one, (other, wanted) in enumerate(self.shape.likes):
            cached = min(self.shape.sequences[i][0] for i in (one, other))
            num_blocks = min(wanted, cached // size) if other != one else 0
            self.tables[one][:num_blocks] = self.tables[other][:num_blocks]
            for mine, theirs in zip(self.whole[one], self.whole[other], strict=True):
                mine[: num_blocks * size] = theirs[: num_blocks * size]

    def poison(self) -> None:
        """What strangers left in the blocks is NaN."""
        slots = torch.arange(self.store.num_blocks * self.shape.block_size)
        shape, layer = (len(slots), self.shape.num_kv_heads), self.store.spec.layers[0]
        self.store.write(
            0,
            torch.full((*shape, layer.key_dim), torch.nan),
            torch.full((*shape, layer.value_dim), torch.nan),
            slots,
        )

    def slots(self, table: list[int], num_tokens: int) -> Tensor:
        size = self.shape.block_size
        return torch.tensor([table[p // size] * size + p % size for p in range(num_tokens)]).long()

    def metadata(self, copies: tuple[CopyRun, ...] = ()) -> AttentionMetadata:
        """Say what the step is."""
        plan = StepPlan(
            tuple(
                ScheduledSequence(
                    SequenceId(i), array("I", [0] * new), cached, (array("I", self.tables[i]),)
                )
                for i, (cached, new) in enumerate(self.shape.sequences)
            ),
            copies,
        )
        return build_inputs(plan, self.shape.block_size, torch.device("cpu")).groups[0]

    def attend(
        self,
        style: AttentionStyle,
        backend: AttentionBackend | None = None,
        copies: tuple[CopyRun, ...] = (),
    ) -> Tensor:
        """Run the step through a backend, its own or another one that can read its store."""
        step = (backend or self.backend).start(self.metadata(copies), self.store)
        keys, values = self.new_rows()
        first = step.attend(0, self.queries, keys, values, style)
        assert torch.equal(first, step.attend(0, self.queries, keys, values, style)), "memo"
        return first

    def release(self, window: int) -> None:
        """Give back the blocks that left each sequence's window, as the cache does."""
        size = self.shape.block_size
        for (cached, _), table in zip(self.shape.sequences, self.tables, strict=True):
            left = max(0, cached - window + 1) // size
            table[:left] = [self.store.num_blocks] * left

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the step's tokens."""
        new = [n for _, n in self.shape.sequences]
        keys, values = (
            torch.cat([both[i][-n:] for both, n in zip(self.whole, new, strict=True)])
            for i in (0, 1)
        )
        return keys, values

    def keep_in_codes(self) -> None:
        """Expect what a store of 8 bits made of all keys and values."""
        self.whole = [(decode(encode(k)), decode(encode(v))) for k, v in self.whole]

    def expected(self, style: AttentionStyle) -> Tensor:
        """Run it through the reference, sequence by sequence."""
        found, row = [], 0
        for (_, new), (keys, values) in zip(self.shape.sequences, self.whole, strict=True):
            queries = self.queries[row : row + new].double()
            found.append(attend_sequence(queries, keys.double(), values.double(), style))
            row += new
        return torch.cat(found)


@st.composite
def styles(
    draw: st.DrawFn, num_heads: int, scales: Sequence[float] = (0.5, 1.0, 2.0)
) -> AttentionStyle:
    """All that a layer may ask for, in any combination."""
    sink = st.floats(-3, 3, width=32)
    return AttentionStyle(
        scale=draw(st.sampled_from(scales)),
        window=draw(st.none() | st.integers(1, 24)),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 5.0])),
        sinks=draw(
            st.none() | st.lists(sink, min_size=num_heads, max_size=num_heads).map(torch.tensor)
        ),
    )

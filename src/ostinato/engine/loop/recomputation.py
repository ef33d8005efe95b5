"""Computes a prefix again beside the cache, and compares keys, values and states.

::

    tokens          0        64       128       192
    first pass      ├────────┼────────┼────────┤       as the cache should have them
    second pass     ├─────────────────┼────────┤       where rounding may differ: by how much
    checkpoints              ▲                 ▲       compared when the first pass is there

Where the native library computes whole steps, there is one pass, and all bits must be equal. Other
models round by the shape of a step, so a second pass with longer chunks measures by how much: a
cached row may differ from the first pass by ``NOISE_FACTOR`` times as much, or in the lower half of
its digits.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.cache.block_table import BlockTable
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.inputs import build_inputs
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.model_runner import ModelRunner

CHUNK_TOKENS = 64
"""Tokens of a chunk of the first pass; states are kept at its multiples alone."""

NOISE_FACTOR = 8
"""By how much more than the two passes from each other a cached row may differ."""

MAX_TOLERANCE = 0.5
"""Relative difference that is wrong whatever the passes do; rows of other tokens differ by 1.4."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A prefix whose cached keys, values or states differ from those that the model computes."""

    num_tokens: int  # tokens that were compared
    first_token: int  # the first of them that differs, or after which a state does
    layers: tuple[int, ...]  # layers in which any differ
    cached_blocks: tuple[tuple[int, ...], ...]  # the cache's, one table per group of layers; of
    # states, the slot of each multiple of 64 tokens, or -1
    computed_blocks: tuple[int, ...]  # those that they were compared with
    num_removed: int = 0  # blocks that were removed from the cache for it


class _Pass:
    """A prefix in a store of its own."""

    def __init__(self, key: PrefixKey, runner: ModelRunner) -> None:
        store = runner.kv_stores[0]
        self._key, num_groups = key, runner.groups.num_groups
        self.table = array("i", range(len(key.tokens) // store.block_size))
        self.runner = ModelRunner(
            runner.loaded, [len(self.table)] * num_groups, store.block_size, store.dtype,
            runner.attention, runner.groups, num_state_slots=1,
        )  # fmt: skip
        self.runner.adapters = runner.adapters

    @torch.inference_mode()
    def compute(self, first: int, last: int) -> None:
        """Compute a chunk."""
        tables = (self.table,) * self.runner.groups.num_groups
        slot = 0 if self.runner.loaded.state_spec.layers else None
        sequence = ScheduledSequence(
            SequenceId(0), self._key.tokens[first:last], first, tables, None,
            identity=self._key.identity, state_slot=slot,
        )  # fmt: skip
        plan, store = StepPlan((sequence,)), self.runner.kv_stores[0]
        inputs = build_inputs(plan, store.block_size, store.device)
        self.runner.forward(inputs, StepAdapters.of(plan, self.runner.adapters))

    def state(self, layer: int) -> list[Tensor]:
        """Return a layer's state after the last chunk, each tensor as one row."""
        return [tensor[:1] for tensor in self.runner.states.states(layer)]


class Recomputation:
    """Computes a prefix again, chunk by chunk, and compares it at the end."""

    def __init__(self, key: PrefixKey, runner: ModelRunner, is_exact: bool) -> None:
        """Begin.

        Args:
            key: Whole blocks; of a model with states up to a checkpoint.
            runner: The engine's.
            is_exact: Whether the same bits are promised.
        """
        self.key, self.is_exact = key, is_exact
        self._cached, self._num_passes = runner, 1 if is_exact else 2
        self._passes = [_Pass(key, runner) for _ in range(self._num_passes)]
        self._noise = defaultdict[int, float](float)  # of each layer
        self._state_errors: list[tuple[int, int, float]] = []  # position, layer, how much
        self._chunks = self._order()

    def _order(self) -> Iterator[tuple[int, int, int]]:
        """Yield end, pass and beginning of each chunk; the first pass comes first everywhere."""
        length = len(self.key.tokens)
        return iter(
            sorted(
                (min(first + size, length), number, first)
                for number in range(self._num_passes)
                for size in [CHUNK_TOKENS << number]
                for first in range(0, length, size)
            )
        )

    def compute_chunk(self, checkpoints: Mapping[int, int]) -> bool:
        """Compute the next chunk, and compare the state at its end; returns False if none is left.

        Args:
            checkpoints: Slots of the states that the cache has of the prefix, by position.
        """
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        end, number, first = chunk
        self._passes[number].compute(first, end)
        for layer in self._cached.loaded.state_spec.layers:
            own = self._passes[0].state(layer)
            if number:
                noise = self._largest_error(self._passes[1].state(layer), own)
                self._noise[layer] = max(self._noise[layer], noise)
            elif end in checkpoints:
                slot = checkpoints[end]
                cached = (tensor[slot : slot + 1] for tensor in self._cached.states.states(layer))
                error = self._largest_error(cached, own)
                self._state_errors.append((end, layer, error))
        return True

    def compared(self, table: BlockTable, checkpoints: Mapping[int, int]) -> AuditFinding | None:
        """Compare with the cache's blocks; returns where they differ, if they do.

        Args:
            table: Of the prefix, held.
            checkpoints: Slots of its states, by position.
        """
        first, layers = len(self.key.tokens), set[int]()
        stores = (self._cached.kv_stores, *(one.runner.kv_stores for one in self._passes))
        for blocks, cached, own, *others in zip(table.groups, *stores, strict=True):
            held = [place for place, block in enumerate(blocks) if block < cached.num_blocks]
            own_slots = _slots(own, held)
            slots = _slots(cached, [blocks[place] for place in held])
            for layer in cached.layers if held else ():
                rows = own.read(layer, own_slots)
                for other in others:
                    noise = self._largest_error(other.read(layer, own_slots), rows)
                    self._noise[layer] = max(self._noise[layer], noise)
                pairs = zip(cached.read(layer, slots), rows, strict=True)
                errors = torch.stack([self._row_errors(a, b) for a, b in pairs]).amax(0)
                wrong = (errors > self._tolerance(layer)).nonzero().flatten()
                if len(wrong):
                    first = min(first, int(own_slots[wrong[0]]))
                    layers.add(layer)
        for end, layer, error in self._state_errors:
            if error > self._tolerance(layer) and end in checkpoints:
                first = min(first, end - 1)
                layers.add(layer)
        if not layers:
            return None
        tables = [tuple(blocks) for blocks in table.groups]
        if self._cached.loaded.state_spec.layers:
            ends = range(CHUNK_TOKENS, len(self.key.tokens) + 1, CHUNK_TOKENS)
            tables.append(tuple(checkpoints.get(end, -1) for end in ends))
        computed = tuple(self._passes[0].table)
        return AuditFinding(
            len(self.key.tokens), first, tuple(sorted(layers)), tuple(tables), computed
        )

    def _row_errors(self, rows: Tensor, expected: Tensor) -> Tensor:
        """Return by how much each row differs, shape (num_rows,): relatively, or 1 if at all."""
        if self.is_exact:
            differ = rows.view(torch.uint8) != expected.view(torch.uint8)
            return differ.flatten(1).any(1).double()
        rows, expected = rows.flatten(1).double(), expected.flatten(1).double()
        scale = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        errors: Tensor = (rows - expected).norm(dim=1) / scale
        return errors.nan_to_num(torch.inf)

    def _largest_error(self, rows: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
        """Return by how much a layer's rows differ at most."""
        pairs = zip(rows, expected, strict=True)
        return max(float(self._row_errors(one, other).max()) for one, other in pairs)

    def _tolerance(self, layer: int) -> float:
        if self.is_exact:
            return 0.0
        has_codes = self._cached.kv_stores[0].dtype == torch.int8
        dtype = torch.bfloat16 if has_codes else self._cached.loaded.dtype
        half_of_digits: float = torch.finfo(dtype).eps ** 0.5
        return min(MAX_TOLERANCE, max(half_of_digits, NOISE_FACTOR * self._noise[layer]))


def _slots(store: KVStore, blocks: list[int]) -> Tensor:
    """Return the slots of some blocks, shape (len(blocks) * block_size,), int64."""
    offsets = torch.arange(store.block_size)
    return (torch.tensor(blocks)[:, None] * store.block_size + offsets).flatten().long()

"""Computes whole steps on a device: one copy of tables in, one copy of token ids out.

::

    host     tables ─┐                 ┌─ plan the next step's reads ─┐  ids ─► the next tables
    device           └─► copy ─► model ──────────────► sample ─► copy ┴──►

The function that computes a step, ``DeviceSteps._compute``, reads tables and nothing else. Steps of
decodes are padded to few sizes, and it is captured for each; for any other step, and on a CPU, it
runs as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import SampleTask
from ostinato.runner.attention.backend import CallsModel, GroupedStep
from ostinato.runner.gpu.attention_step import (
    DevicePlan,
    GroupTables,
    TritonKVStore,
    TritonStep,
    arrays_of,
    check_places,
)
from ostinato.runner.gpu.device_sampling import (
    SamplingKind,
    sample_in_step,
    sampling_kind,
    sampling_tables,
)
from ostinato.runner.gpu.padding import MAX_PADDED_ROWS, pad, pad_parts, padded_rows, padded_size
from ostinato.runner.gpu.read_planner import LayerKind, ReadPlanner
from ostinato.runner.gpu.step_graphs import Capture, StepGraphs, StepTensors, cuda_capture
from ostinato.runner.gpu.step_tables import Arrays, DeviceTables
from ostinato.runner.inputs import StepInputs
from ostinato.runner.kv.kv_store import KVStore

_PLACES = "slots", "sources", "targets", "blocks"
_PLAN = (
    *("tokens", "positions", "narrow", "wide"),
    *("merge_tokens", "merge_starts", "merge_partials"),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step whose tables are ready.

    Attributes:
        inputs: The step.
        num_partials: Of the plans of each group of layers, by kind.
        sampling: How it samples; None if its logits are sampled afterwards.
        has_all_rows: Whether each row has logits.
        is_padded: Whether it is a step of decodes, padded to one of few sizes.
        tables: Its tables on the device.
    """

    inputs: StepInputs
    num_partials: tuple[dict[LayerKind, int], ...]
    sampling: SamplingKind | None
    has_all_rows: bool
    is_padded: bool
    tables: dict[str, Tensor]

    @property
    def key(self) -> tuple[object, ...]:
        """Every number that the step computes with and that is in none of its tables."""
        shapes = tuple((name, tuple(table.shape)) for name, table in self.tables.items())
        partials = tuple(tuple(each.items()) for each in self.num_partials)
        return shapes, partials, self.sampling


class DeviceSteps:
    """Computes whole steps of one model; see ``attention.backend.WholeSteps``.

    Attributes:
        planner: Plans what is read.
        tables: The tables of all steps.
        graphs: Captured steps.
    """

    def __init__(
        self,
        call: CallsModel,
        stores: Sequence[KVStore],
        of_layer: tuple[int, ...],
        planner: ReadPlanner,
        capture: Capture | None = None,
    ) -> None:
        """Allocate the tables.

        Args:
            call: Calls the model, see ``ModelCall``.
            stores: Keys and values, one store per group of layers.
            of_layer: The group of each layer.
            planner: Plans what is read.
            capture: Captures steps; None captures them on CUDA.
        """
        self._call, self._of_layer = call, of_layer
        self._stores = [store for store in stores if isinstance(store, TritonKVStore)]
        assert len(self._stores) == len(stores), "stores of its own"
        self._device = stores[0].device
        self._vocab = 0  # unknown until the first step
        self._kinds: tuple[tuple[LayerKind, ...], ...] | None = None  # likewise, by group
        self.planner, self.tables = planner, DeviceTables(self._device)
        if capture is None and self._device.type == "cuda":
            capture = cuda_capture(self._device)
        self.graphs = StepGraphs(capture)

    def __call__(
        self, inputs: StepInputs, tasks: Sequence[SampleTask]
    ) -> tuple[Tensor, list[int] | None]:
        """Compute a step; see ``WholeSteps``."""
        for metadata, store in zip(inputs.groups, self._stores, strict=True):
            check_places(metadata, store)
        step = self._prepare(inputs, tasks)
        if step.is_padded and self._kinds is not None:
            result = self.graphs.run(step.key, lambda: self._compute(step))
        else:
            result = self._compute(step)
        num_rows = len(inputs.logit_rows)
        ids = None if result.ids is None else _HostIds(result.ids[:num_rows])
        if _are_decodes(inputs) and self._kinds is not None:
            for index, metadata in enumerate(inputs.groups):  # while the device computes
                self.planner.plan_ahead(index, metadata, self._kinds[index])
        return result.logits[:num_rows], None if ids is None else ids.wait()

    def _prepare(self, inputs: StepInputs, tasks: Sequence[SampleTask]) -> _Step:
        """Plan a step, and copy all its tables to the device."""
        num_rows = len(inputs.input_ids)
        is_padded = _are_decodes(inputs) and num_rows <= MAX_PADDED_ROWS
        size = padded_rows(num_rows) if is_padded else num_rows
        has_all_rows = len(inputs.logit_rows) == num_rows
        sampling = None
        if tasks and self._vocab and len(tasks) == len(inputs.logit_rows):
            sampling = sampling_kind(tasks, self._vocab)
        arrays = {
            "ids": pad(inputs.input_ids, size, 0),
            "positions": pad(inputs.position_ids, size, 0),
        }
        if not has_all_rows:
            arrays["rows"] = inputs.logit_rows
        num_sampled = size if is_padded else len(tasks)
        if sampling is not None:
            arrays |= sampling_tables(sampling, tasks, self._vocab, num_sampled)
        num_partials = []
        for index in range(len(inputs.groups)):
            own, partials = self._group_arrays(inputs, index, size if is_padded else None)
            arrays |= own
            num_partials.append(partials)
        num_moves = self.tables.num_moves
        tables = self.tables.put(arrays)
        if self.tables.num_moves > num_moves:
            self.graphs.forget()
        return _Step(inputs, tuple(num_partials), sampling, has_all_rows, is_padded, tables)

    def _group_arrays(
        self, inputs: StepInputs, index: int, size: int | None
    ) -> tuple[Arrays, dict[LayerKind, int]]:
        """Return the arrays of one group of layers, and partial results by kind.

        Args:
            inputs: The step.
            index: The group.
            size: Rows to pad to; None pads nothing.
        """
        metadata = inputs.groups[index]
        places = dict(zip(_PLACES, arrays_of(metadata), strict=True))
        if size is not None:
            places["slots"] = pad(places["slots"], size, -1)
            blocks = places["blocks"]
            places["blocks"] = pad(blocks, padded_size(len(blocks)), 0)
        arrays = {f"{index} {name}": array for name, array in places.items()}
        kinds = () if self._kinds is None else self._kinds[index]
        num_partials = {}
        for number, (kind, parts) in enumerate(self.planner.plan(index, metadata, kinds).items()):
            if size is not None:
                parts = pad_parts(parts, self.planner.limits(kind), size)
            num_partials[kind] = parts.num_partials
            for name, array in zip(_PLAN, parts.arrays(), strict=True):
                arrays[f"{index} {number} {name}"] = array
        return arrays, num_partials

    def _compute(self, step: _Step) -> StepTensors:
        """Compute a step from its tables; this is what is captured."""
        tables, inputs = step.tables, step.inputs
        groups = [self._attention(step, index) for index in range(len(inputs.groups))]
        logits = self._call(
            tables["ids"],
            tables["positions"],
            GroupedStep(tuple(groups), self._of_layer),
            None if step.has_all_rows else tables["rows"],
        )
        if self._kinds is None:
            self._vocab = logits.shape[1]
            self._kinds = tuple(tuple(group.tables.plans) for group in groups)
        sampling = step.sampling
        ids = None if sampling is None else sample_in_step(logits, sampling, tables)
        return StepTensors(logits, ids)

    def _attention(self, step: _Step, index: int) -> TritonStep:
        """Return the attention of one group of layers, over the tables."""
        tables, plans = step.tables, {}
        for number, (kind, num_partials) in enumerate(step.num_partials[index].items()):
            arrays = tuple(tables[f"{index} {number} {name}"] for name in _PLAN)
            plans[kind] = DevicePlan(self.planner.limits(kind), num_partials, arrays)
        slots, sources, targets, blocks = (tables[f"{index} {name}"] for name in _PLACES)
        own = GroupTables((slots, sources, targets), blocks, plans)
        return TritonStep(step.inputs.groups[index], self._stores[index], self.planner, own)


class _HostIds:
    """Sampled ids on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        """Queue the copy behind the step."""
        on_gpu = ids.device.type == "cuda"
        self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=on_gpu)
        self._ids.copy_(ids, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(ids.device))

    def wait(self) -> list[int]:
        """Wait for the ids."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self._ids.tolist()
        return ids


def _are_decodes(inputs: StepInputs) -> bool:
    """Whether each sequence has one row, which is sampled, and nothing is copied."""
    num_rows = len(inputs.input_ids)
    return (
        len(inputs.logit_rows) == num_rows == len(inputs.groups[0].first_positions)
        and not any(map(len, inputs.prompt_rows))
        and not any(np.size(metadata.copy_targets) for metadata in inputs.groups)
    )

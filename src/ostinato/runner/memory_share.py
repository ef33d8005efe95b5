"""Sizes the KV store by a share of the device's memory, as vLLM's ``gpu_memory_utilization``.

::

    total memory of the device
    ├── share ──────────────────────────────────────────────┐
    │ weights, contexts │ activations of the │ keys, values │ what others may have
    │ since the start   │ largest step       │ and states   │

The largest step is computed once, on random tokens, with blocks of its own that are freed after
it. Memory that other processes had before the start counts against nothing, but has to be outside
of the share.
"""

from array import array
from collections.abc import Callable
from typing import Protocol

import torch

from ostinato.core.config import SchedulerConfig
from ostinato.core.ids import SequenceId
from ostinato.core.plan import SampleTask, ScheduledSequence, StepPlan
from ostinato.core.sampling_params import SamplingParams
from ostinato.errors import ConfigError
from ostinato.runner.model_runner import ModelRunner

NewRunner = Callable[[int, int], ModelRunner]
"""Makes a runner from the number of blocks of each group and the number of state slots."""


class DeviceMemory(Protocol):
    """The memory of a device."""

    @property
    def total_bytes(self) -> int:
        """All of it."""

    def free_bytes(self) -> int:
        """Return what is free; what torch keeps for later is returned first."""

    def peak_during(self, work: Callable[[], object]) -> int:
        """Do some work; return the bytes that it takes at most, and has not before."""


class CudaMemory:
    """The memory of a CUDA device; see ``DeviceMemory``."""

    def __init__(self, device: torch.device) -> None:
        """Take a device."""
        self._device = device

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        """Return what is free; what torch keeps for later is returned first."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_during(self, work: Callable[[], object]) -> int:
        """Do some work; return the bytes that it takes at most, and has not before."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


class MemoryShare:
    """A share of a device's memory, from before the model is loaded."""

    def __init__(self, share: float, memory: DeviceMemory) -> None:
        """Check that the share is free.

        Args:
            share: Between 0 and 1, of all memory of the device.
            memory: Its memory.

        Raises:
            ConfigError: Others have part of it.
        """
        self._share, self._memory = share, memory
        self._free_at_start = memory.free_bytes()
        self._bytes = int(share * memory.total_bytes)
        if self._free_at_start < self._bytes:
            raise ConfigError(
                f"gpu_memory_utilization={share}: that is {self._bytes:,} of "
                f"{memory.total_bytes:,} bytes, and only {self._free_at_start:,} are free: lower "
                "it, or end what uses the GPU"
            )

    def kv_bytes(self, new_runner: NewRunner, scheduling: SchedulerConfig, block_size: int) -> int:
        """Return what is left for keys, values and states; called once the model is loaded.

        Raises:
            ConfigError: Nothing is.

        Effects: computes the largest step once.
        """
        activations, num_tokens = self._measured(new_runner, scheduling, block_size)
        loaded = self._free_at_start - self._memory.free_bytes()
        left = self._bytes - loaded - activations
        if left <= 0:
            raise ConfigError(
                f"gpu_memory_utilization={self._share} leaves nothing for keys and values: of "
                f"{self._bytes:,} bytes the model takes {loaded:,} and a step of "
                f"{num_tokens:,} tokens {activations:,}: raise it, or lower "
                f"max_num_batched_tokens={scheduling.max_num_batched_tokens}"
            )
        return left

    def _measured(
        self, new_runner: NewRunner, scheduling: SchedulerConfig, block_size: int
    ) -> tuple[int, int]:
        """Compute the largest step; returns what it takes beside its blocks, and its tokens."""
        plan = largest_step(scheduling, block_size, 1)
        num_blocks = sum(len(sequence.tables[0]) for sequence in plan.sequences)
        runner = new_runner(num_blocks, len(plan.sequences))
        has_states = runner.loaded.state_spec.bytes_per_slot > 0
        plan = largest_step(scheduling, block_size, len(runner.kv_stores), has_states)
        return self._memory.peak_during(lambda: runner.execute(plan)), plan.num_tokens


def largest_step(
    scheduling: SchedulerConfig, block_size: int, num_groups: int, has_states: bool = False
) -> StepPlan:
    """Return a step of as many tokens and sequences as the scheduler may plan, all sampled."""
    budget, longest = scheduling.max_num_batched_tokens, scheduling.max_model_len
    num_sequences = min(scheduling.max_num_seqs, budget)
    length = min(budget // num_sequences, longest)
    task = SampleTask(SamplingParams(temperature=1.0), (0,), array("I", [0]), array("I"))
    sequences, first = [], 0
    for index in range(num_sequences):
        # The first takes the rest, as a prompt beside decodes does.
        num_tokens = length
        if index == 0:
            num_tokens = min(longest, budget - length * (num_sequences - 1))
        num_blocks = -(-num_tokens // block_size)
        table = array("I", range(first, first + num_blocks))
        first += num_blocks
        sequences.append(
            ScheduledSequence(
                SequenceId(index),
                array("I", [0] * num_tokens),
                0,
                (table,) * num_groups,
                task,
                state_slot=index if has_states else None,
            )
        )
    return StepPlan(tuple(sequences))

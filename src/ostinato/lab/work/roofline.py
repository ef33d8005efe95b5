"""The time of a step on given GPUs.

Every kernel takes the longer of its arithmetic and its memory traffic::

    matrices    max(FLOP of all tokens / peak,  bytes of the weights they need / bandwidth)
    attention   max(FLOP of all pairs  / peak,  bytes of KV read              / bandwidth)
    exchange    activations sent to the machine's other GPUs / bandwidth of the link

with the share of each that engines reach (``gpus``). So prefill is bound by arithmetic, decoding by
memory, and a mixture of experts computes like a small model and decodes like a large one.

Source: Williams, Waterman and Patterson, "Roofline", 2009; decoding as in Pope et al.,
"Efficiently Scaling Transformer Inference", arXiv 2211.05102.
"""

from dataclasses import dataclass, replace

import numpy as np

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StepPlan
from ostinato.lab.size.gpus import DENSE_SHARE, GIB, MEMORY_SHARE, MOE_SHARE, USABLE_MEMORY, Gpu
from ostinato.lab.work.cost_model import PerRequest
from ostinato.lab.work.model_work import AttentionGroup, ModelWork

MAX_RUNNING = 256
"""Sequences that decode at once, at most; vLLM's and our own default."""

_MIN_KV_SHARE = 0.1
"""Of the usable memory, that must be left for KV where the number of GPUs is chosen."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one replica.

    Attributes:
        gpu: Kind of GPU.
        num_gpus: GPUs of a replica, by tensor parallelism.
        compute_share: Share of peak arithmetic; None is a share for experts and one for all else.
        memory_share: Share of the bandwidth of memory and links.
    """

    gpu: Gpu
    num_gpus: int
    compute_share: float | None = None
    memory_share: float = MEMORY_SHARE

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            ConfigError: One is not above 0, or above 1.
        """
        for name in ("compute_share", "memory_share"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{name}={share}: must be above 0 and at most 1")

    @property
    def usable_bytes(self) -> int:
        """Memory for weights and KV."""
        return int(self.num_gpus * self.gpu.memory_bytes * USABLE_MEMORY)


def choose_machine(model: ModelWork, machine: Machine) -> Machine:
    """Return a machine with enough GPUs for a model; 0 GPUs are as few as leave room for KV.

    Raises:
        ConfigError: The weights do not fit; the message says how many GPUs are the least.
    """
    min_gpus = _min_gpus(model, machine, 0.0)
    if not machine.num_gpus:
        return replace(machine, num_gpus=_min_gpus(model, machine, _MIN_KV_SHARE))
    if machine.num_gpus < min_gpus:
        raise ConfigError(
            f"gpus={machine.num_gpus}: {model.weight_bytes / GIB:,.1f} GiB of weights do not fit "
            f"into {machine.usable_bytes / GIB:,.1f} GiB, {USABLE_MEMORY:.0%} of the memory of "
            f"{machine.num_gpus} x {machine.gpu.name}: {min_gpus} are the least"
        )
    return machine


def _min_gpus(model: ModelWork, machine: Machine, kv_share: float) -> int:
    """Return the least power of two of GPUs whose memory holds the weights."""
    num_gpus = 1
    while replace(machine, num_gpus=num_gpus).usable_bytes * (1 - kv_share) < model.weight_bytes:
        num_gpus *= 2
    return num_gpus


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Seconds of a model on a machine.

    Attributes:
        model: The model's work.
        machine: A machine with enough GPUs for its weights.
    """

    model: ModelWork
    machine: Machine

    @property
    def origin(self) -> str:
        """The source of the costs, in a few words."""
        weights, machine = self.model.weights, self.machine
        active = f", {weights.active / 1e9:.3g}B active," if weights.experts is not None else ""
        share = f"{machine.compute_share or DENSE_SHARE:.0%}"
        if weights.experts is not None and machine.compute_share is None:
            share += f" ({MOE_SHARE:.0%} in experts)"
        return (
            f"derived from the config: {weights.total / 1e9:.3g}B parameters{active} in "
            f"{self.model.format.name} on {machine.num_gpus} x {machine.gpu.name}, at {share} of "
            f"its peak and {machine.memory_share:.0%} of its bandwidth"
        )

    @property
    def kv_memory_bytes(self) -> int:
        """Memory of one replica that the weights leave for KV."""
        return max(0, self.machine.usable_bytes - int(self.model.weight_bytes))

    @property
    def kv_copies(self) -> int:
        """How often the KV of a token is kept: with more GPUs than KV heads, some share a head."""
        heads = [group.num_kv_heads for group in self.model.groups if group.num_kv_heads]
        return -(-self.machine.num_gpus // min(heads)) if heads else 1

    def step_s(self, plan: StepPlan) -> float:
        """Return how long a planned step takes."""
        sampled = sum(sequence.sample is not None for sequence in plan.sequences)
        ends = np.array([sequence.end for sequence in plan.sequences], np.float64)
        starts = np.array([sequence.start for sequence in plan.sequences], np.float64)
        seconds = self._matrices_s(plan.num_tokens, sampled)
        for group in self.model.groups:
            flops = group.pair_flops * float(group.pairs(ends, starts).sum())
            read_s = float(self._kv_read_s(group, group.seen(ends)).sum())
            seconds += max(flops / self._flops, read_s)
        return seconds

    def prefill_s(self, num_tokens: PerRequest, num_cached: PerRequest) -> PerRequest:
        """Return the time of prompts after their hits, in compute-bound steps."""
        computed = num_tokens - num_cached
        seconds = computed * (self._token_s + self._exchange_s) + self._sample_s
        for group in self.model.groups:
            pairs = group.pairs(num_tokens, num_cached)
            seconds = seconds + group.pair_flops * pairs / self._flops
        return seconds

    def decode_s(self, num_tokens: PerRequest, num_new: PerRequest) -> PerRequest:
        """Return the time of answers after prompts, in batches as large as memory allows."""
        context = num_tokens + num_new / 2
        batch = self.num_running(float(np.mean(context)))
        per_token = self._matrices_s(batch, batch) / batch
        seconds: PerRequest = per_token * num_new
        for group in self.model.groups:
            seconds = seconds + num_new * self._kv_read_s(group, group.seen(context))
        return seconds

    def num_running(self, context: float) -> int:
        """Return how many sequences of ``context`` tokens memory holds at once."""
        footprint = self.model.kv.windowed or self.model.kv.whole
        each = self.kv_copies * footprint.sequence_bytes(max(1, round(context)))
        return max(1, min(MAX_RUNNING, self.kv_memory_bytes // max(1, each)))

    def _matrices_s(self, num_tokens: float, num_sampled: float) -> float:
        read_s = self.model.read_bytes(num_tokens) / self._bandwidth
        products_s = num_tokens * self._token_s + num_sampled * self._sample_s
        return max(products_s, read_s) + num_tokens * self._exchange_s

    @property
    def _token_s(self) -> float:
        """Arithmetic of a token in the layers' matrices; experts reach a share of their own."""
        weights = self.model.weights
        routed = weights.per_token - weights.dense
        slower = 1.0 if self.machine.compute_share is not None else DENSE_SHARE / MOE_SHARE
        return 2.0 * (weights.dense + routed * slower) / self._flops

    @property
    def _sample_s(self) -> float:
        """Arithmetic of a token in the head."""
        return 2.0 * self.model.weights.head / self._flops

    def _kv_read_s(self, group: AttentionGroup, num_keys: PerRequest) -> PerRequest:
        return num_keys * (group.token_bytes * self.kv_copies / self._bandwidth)

    @property
    def _flops(self) -> float:
        gpu = self.machine.gpu
        peak = gpu.flops_fp8 if self.model.format.is_fp8 else gpu.flops
        return peak * self.machine.num_gpus * (self.machine.compute_share or DENSE_SHARE)

    @property
    def _exchange_s(self) -> float:
        sent = self.model.exchanged_bytes(self.machine.num_gpus)
        return sent / (self.machine.gpu.link * self.machine.memory_share)

    @property
    def _bandwidth(self) -> float:
        return self.machine.gpu.bandwidth * self.machine.num_gpus * self.machine.memory_share

"""On what machine does a replica run?"""

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from ostinato.core.config import at_least
from ostinato.lab.gpus import DENSE_SHARE, GPUS, MEMORY_SHARE, MOE_SHARE, find_gpu
from ostinato.lab.model_work import WEIGHT_FORMATS
from ostinato.lab.quantities import read_bytes
from ostinato.lab.roofline import Machine

_MACHINE = "The machine"

GpuName = Annotated[
    str | None,
    typer.Option("--gpu", help=f"{', '.join(GPUS)}; h100 unless said.", rich_help_panel=_MACHINE),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        help="Of one replica, by tensor parallelism; as few as hold the weights unless said.",
        rich_help_panel=_MACHINE,
    ),
]
WeightFormat = Annotated[
    str | None,
    typer.Option(
        help=f"Format of the weights: {', '.join(WEIGHT_FORMATS)}. auto takes the config's.",
        rich_help_panel=_MACHINE,
    ),
]
ComputeShare = Annotated[
    float | None,
    typer.Option(
        help=f"Share of the GPU's peak that prefill reaches; {DENSE_SHARE} for dense models and "
        f"{MOE_SHARE} for mixtures of experts unless said.",
        rich_help_panel=_MACHINE,
    ),
]
MemoryShare = Annotated[
    float | None,
    typer.Option(
        help=f"Share of the memory bandwidth that decoding reaches; {MEMORY_SHARE} unless said.",
        rich_help_panel=_MACHINE,
    ),
]
GpuTflops = Annotated[
    float | None,
    typer.Option(help="Peak TFLOP/s in bfloat16, instead of --gpu's.", rich_help_panel=_MACHINE),
]
GpuBandwidth = Annotated[
    float | None,
    typer.Option(help="TB/s of its memory, instead of --gpu's.", rich_help_panel=_MACHINE),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of one GPU, such as 80GiB, instead of --gpu's.", rich_help_panel=_MACHINE
    ),
]


@dataclass(frozen=True)
class MachineOptions:
    """The GPUs of one replica."""

    gpu: GpuName = None
    gpus: NumGpus = None
    weights: WeightFormat = None
    compute_share: ComputeShare = None
    memory_share: MemoryShare = None
    gpu_tflops: GpuTflops = None
    gpu_bandwidth: GpuBandwidth = None
    gpu_memory: GpuMemory = None

    @property
    def given(self) -> list[str]:
        """Names of the options that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def machine(self) -> Machine:
        """Return the machine; 0 GPUs are as few as hold the weights.

        Raises:
            ConfigError: An option is out of range.
        """
        if self.gpus is not None:
            at_least("gpus", self.gpus, 1)
        memory = None if self.gpu_memory is None else read_bytes("gpu_memory", self.gpu_memory)
        gpu = find_gpu(self.gpu or "h100").overridden(self.gpu_tflops, self.gpu_bandwidth, memory)
        share = MEMORY_SHARE if self.memory_share is None else self.memory_share
        return Machine(gpu, self.gpus or 0, self.compute_share, share)

"""Data sheets of GPUs: peak FLOP/s without sparsity, memory bandwidth, and memory.

Sources: the makers' data sheets (NVIDIA H100, H200, B200, A100, L40S, L4, A10G, RTX 4090; AMD
MI300X). Memory is what the driver reports as total, which is a little less than the sheet says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ostinato.core.config import one_of
from ostinato.core.errors import ConfigError

GIB = 2**30

DENSE_SHARE = 0.5
MOE_SHARE = 0.18
"""Share of peak arithmetic that prefill reaches: the second in routed experts, the first elsewhere.

Fitted to the throughput that NVIDIA publishes for TensorRT-LLM 1.0 with Llama 3.1 8B and
Qwen3-235B-A22B ("Overview" of its performance pages; docs/simulate.md has the errors). Experts
reach less: each multiplies few tokens at a time.
"""

MEMORY_SHARE = 0.7
"""Share of the bandwidth of memory and links that decoding reaches, from the same table."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory for weights and KV; vLLM's ``gpu_memory_utilization`` is the same."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: Name in the table.
        flops: Peak in bfloat16, FLOP/s.
        flops_fp8: Peak with weights and activations in 8 bits; that of bfloat16 where the
            hardware has no FP8.
        bandwidth: Memory bandwidth, bytes/s.
        link: Bandwidth to other GPUs of the machine, bytes/s in one direction: NVLink, or PCIe.
        memory_bytes: Total memory.
    """

    name: str
    flops: float
    flops_fp8: float
    bandwidth: float
    link: float
    memory_bytes: int

    def overridden(
        self, tflops: float | None, bandwidth_tb: float | None, memory_bytes: int | None
    ) -> "Gpu":
        """Return the GPU with another peak in bfloat16, bandwidth in TB/s or memory.

        FP8 keeps its ratio to bfloat16.

        Raises:
            ConfigError: A value is not above 0.
        """
        for name, figure in (("gpu_tflops", tflops), ("gpu_bandwidth", bandwidth_tb)):
            if figure is not None and not 0 < figure < float("inf"):
                raise ConfigError(f"{name}={figure}: must be above 0")
        flops = self.flops if tflops is None else tflops * 1e12
        return replace(
            self,
            flops=flops,
            flops_fp8=flops * self.flops_fp8 / self.flops,
            bandwidth=self.bandwidth if bandwidth_tb is None else bandwidth_tb * 1e12,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
        )


def _gpu(name: str, tflops: tuple[float, float], tb_s: float, link_gb_s: int, gib: float) -> Gpu:
    flops, flops_fp8 = (each * 1e12 for each in tflops)
    return Gpu(name, flops, flops_fp8, tb_s * 1e12, link_gb_s * 1e9, round(gib * GIB))


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (  #      bf16    FP8     TB/s  GB/s  GiB
        _gpu("h100", (989.4, 1978.9), 3.35, 450, 79.6),
        _gpu("h200", (989.4, 1978.9), 4.8, 450, 140.4),
        _gpu("b200", (2250.0, 4500.0), 8.0, 900, 179.1),
        _gpu("a100", (312.0, 312.0), 2.039, 300, 80.0),
        _gpu("l40s", (362.0, 733.0), 0.864, 32, 45.0),
        _gpu("l4", (121.0, 242.0), 0.3, 32, 22.5),
        _gpu("a10g", (70.0, 70.0), 0.6, 32, 22.5),
        _gpu("rtx4090", (165.2, 330.3), 1.008, 32, 24.0),
        _gpu("mi300x", (1307.4, 2614.9), 5.3, 448, 192.0),
    )
}
"""GPUs by name."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table.

    Raises:
        ConfigError: There is none of that name.
    """
    short = name.lower().replace("-", "").replace(" ", "").removesuffix("sxm")
    one_of("gpu", short, tuple(GPUS))
    return GPUS[short]

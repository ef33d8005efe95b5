"""Times of attention on a GPU beside other libraries', for ``scripts/gpu-check``."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TableSizes:
    """How much is measured.

    Attributes:
        shared: Shared tokens of decodes.
        batches: Decodes at once.
        tail: Own tokens of a decode.
        chunk: New tokens of the prefill.
        repeats: Runs whose median counts.
    """

    shared: tuple[int, ...]
    batches: tuple[int, ...]
    tail: int
    chunk: int
    repeats: int


class Case:
    """Decodes on a shared prefix with private tails, or one chunk; bfloat16, on a CPU float32.

    Attributes:
        batch: Sequences.
        shared: Tokens that all of them share.
    """

    def __init__(
        self, device: str, batch: int, shared: int, tail: int, new: int = 1, same_bits: bool = False
    ) -> None:
        """Fill a store with random keys and values; the first sequence is the same in all cases."""
        import numpy as np

        from ostinato.runner.inputs import AttentionMetadata
        from ostinato.runner.kv.kv_store import KVSpec, LayerKV, StoreShape

        self.device, self.batch, self.shared, self.new = torch.device(device), batch, shared, new
        on_gpu = self.device.type == "cuda"
        self.heads, self.kv_heads, self.dim = (32, 8, 128) if on_gpu else (4, 2, 32)
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        size, self.length = 16, shared + tail
        columns, common = -(-self.length // size), shared // size
        own = np.arange(batch * (columns - common)).reshape(batch, -1) + common
        self.tables = np.concatenate((np.tile(np.arange(common), (batch, 1)), own), axis=1)
        num_blocks = int(self.tables.max()) + 1
        spec = KVSpec((LayerKV(self.kv_heads, self.dim, self.dim),))
        self.store_shape = StoreShape(spec, num_blocks, size, self.dtype, self.device)
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(num_blocks * size, self.kv_heads, self.dim, generator=draw)
        self.keys, self.values = (t.to(self.device, self.dtype) for t in (rows, rows.flip(2)))
        draw = torch.Generator().manual_seed(1)
        queries = torch.randn(batch * new, self.heads, self.dim, generator=draw)
        self.queries = queries.to(self.device, self.dtype)
        positions = np.arange(self.length - new, self.length)
        slots = self.tables[:, positions // size] * size + positions % size
        empty = np.empty(0, dtype=np.int64)
        self.metadata = AttentionMetadata(
            slots=slots.reshape(-1), copy_sources=empty, copy_targets=empty,
            starts=np.arange(batch + 1) * new,
            first_positions=np.full(batch, self.length - new),
            blocks=self.tables.reshape(-1).astype(np.int64),
            table_starts=np.arange(batch + 1) * columns, block_size=size, device=self.device,
        )  # fmt: skip

    def step(self, backend: Any) -> Callable[[], torch.Tensor]:
        """Return a call that reads one layer, its plan and store ready."""
        from ostinato.runner.attention.backend import AttentionStyle

        store = backend.new_store(self.store_shape)
        store.write(0, self.keys, self.values, torch.arange(len(self.keys), device=self.device))
        step, style = backend.start(self.metadata, store), AttentionStyle(self.dim**-0.5)
        return lambda: step.read(0, self.queries, style)

    def attend(self, backend: Any) -> torch.Tensor:
        """Read one layer once."""
        return self.step(backend)()

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all distinct keys and values."""
        num_keys = self.shared + self.batch * (self.length - self.shared)
        return num_keys * self.kv_heads * self.dim * 2 * self.dtype.itemsize


def sdpa_per_request(case: Case) -> Callable[[], torch.Tensor]:
    """Return torch's attention, one call for each request over its own keys."""
    slots = torch.from_numpy(case.tables).to(case.device)[:, :, None] * 16
    slots = (slots + torch.arange(16, device=case.device)).flatten(1)[:, : case.length]
    group = case.heads // case.kv_heads
    kept = [
        tuple(
            t[s].transpose(0, 1).repeat_interleave(group, 0)[None] for t in (case.keys, case.values)
        )
        for s in slots
    ]
    queries = case.queries.view(case.batch, case.new, case.heads, case.dim).transpose(1, 2)
    seen = torch.ones(case.new, case.length, dtype=torch.bool, device=case.device)
    seen = seen.tril(case.length - case.new)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> torch.Tensor:
        parts = [
            attend(queries[i : i + 1], keys, values, attn_mask=seen)
            for i, (keys, values) in enumerate(kept)
        ]
        return torch.cat(parts).transpose(1, 2).flatten(0, 1)

    return run


def flashinfer_cascade(case: Case) -> Callable[[], torch.Tensor] | None:
    """Return FlashInfer's cascade of two levels; None without FlashInfer, or for a chunk."""
    try:
        import flashinfer
    except ImportError:
        return None
    if case.new > 1 or case.device.type != "cuda":
        return None
    options: dict[str, Any] = {"dtype": torch.int32, "device": case.device}
    tables, common = torch.tensor(case.tables, **options), case.shared // 16
    own = tables.shape[1] - common
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, torch.empty(2**28, dtype=torch.uint8, device=case.device), "NHD"
    )
    last = case.length - (tables.shape[1] - 1) * 16
    wrapper.plan(
        [torch.tensor([0, case.batch], **options), torch.arange(case.batch + 1, **options)],
        [torch.tensor([0, common], **options), torch.arange(case.batch + 1, **options) * own],
        [tables[0, :common].contiguous(), tables[:, common:].reshape(-1).contiguous()],
        [torch.tensor([16], **options), torch.full((case.batch,), last, **options)],
        case.heads, case.kv_heads, case.dim, 16, q_data_type=case.dtype,
    )  # fmt: skip
    shape = (case.store_shape.num_blocks, 16, case.kv_heads, case.dim)
    paged = torch.stack((case.keys.view(shape), case.values.view(shape)), dim=1)
    return lambda: wrapper.run(case.queries, paged)


def vllm_paged(case: Case) -> Callable[[], torch.Tensor] | None:
    """Return vLLM's FlashAttention over block tables, per request; None without vLLM."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    if case.device.type != "cuda":
        return None
    options: dict[str, Any] = {"dtype": torch.int32, "device": case.device}
    shape = (case.store_shape.num_blocks, 16, case.kv_heads, case.dim)
    arguments = {
        "q": case.queries, "k": case.keys.view(shape), "v": case.values.view(shape),
        "max_seqlen_q": case.new, "max_seqlen_k": case.length, "causal": True,
        "cu_seqlens_q": torch.arange(case.batch + 1, **options) * case.new,
        "seqused_k": torch.full((case.batch,), case.length, **options),
        "block_table": torch.tensor(case.tables, **options),
    }  # fmt: skip
    return lambda: flash_attn_varlen_func(**arguments)


def measure_table(device: str, sizes: TableSizes, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield times of attention in one layer, each beside others' where they are installed.

    Args:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        sizes: How much is measured.
        bandwidth: Bytes a second that a copy within the device reads and writes.
    """
    from ostinato.runner.gpu.backend import TritonAttention

    starts: dict[str, Callable[[Case], Callable[[], torch.Tensor] | None]] = {
        "ours": lambda case: case.step(TritonAttention()),
        "sdpa": sdpa_per_request,
        "flashinfer": flashinfer_cascade,
        "vllm": vllm_paged,
    }
    cases = [
        (f"decode of {batch}", batch, shared, sizes.tail, 1)
        for shared in sizes.shared
        for batch in sizes.batches
    ]
    cases += [("prefill", 1, shared, sizes.chunk, sizes.chunk) for shared in sizes.shared]
    for name, batch, shared, own, new in cases:
        case = Case(device, batch, shared, own, new)
        row: dict[str, Any] = {"case": name, "shared_tokens": shared}
        reference = None
        for peer, start in starts.items():
            try:
                run = start(case)
                row[f"{peer}_ms"] = (
                    None if run is None else median_ms(run, case.device, sizes.repeats)
                )
                result = None if run is None else run().float()
            except Exception as error:  # another library may raise anything
                if peer == "ours":
                    raise
                row[f"{peer}_error"] = f"{type(error).__name__}: {error}"
                continue
            if result is not None and reference is not None:
                row[f"{peer}_difference"] = float(
                    (result.view_as(reference) - reference).abs().max()
                )
            reference = result if reference is None else reference
        row["share_of_bandwidth"] = case.distinct_bytes / (row["ours_ms"] * 1e-3) / bandwidth
        yield row


def median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after two more."""
    times = []
    for _ in range(repeats + 2 * (device.type == "cuda")):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[-repeats:])[repeats // 2]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_bandwidth(device: torch.device, repeats: int) -> float:
    """Return bytes a second that a copy within the device reads and writes."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source), device, repeats))

"""Compile the kernels for GPUs on a machine without one, and print what they take.

    python scripts/gpu_compile.py            # three variants for each target
    python scripts/gpu_compile.py --all      # every head size, format and feature
    python scripts/gpu_compile.py --json     # one object per kernel

Registers and spills are those of the compiled code: by ``cuobjdump`` and ``ptxas -v``, which
Triton's wheel brings, for NVIDIA, and in the assembly's notes for AMD.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # its kernels cannot be compiled
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.runner.forward.quantized import INT4, INT8
from ostinato.runner.gpu.attention_step import kernels, padded, store_tokens, tile_options
from ostinato.runner.gpu.device_forward import GATE_TILE, head_warps, norm_warps
from ostinato.runner.gpu.device_weights import fused_kernels, product_options
from ostinato.runner.gpu.read_parts import PartLimits

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may have."""
REGISTER_LIMITS = {"sm_80": 255, "sm_90": 255, "gfx942": 512}
"""Registers of a thread."""
POINTERS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "int8": "*i8"}
OPTION_NAMES = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Variant:
    """What one kernel is compiled for."""

    key_dim: int
    value_dim: int
    dtype: str
    kv_dtype: str
    has_features: bool  # window, soft cap and sinks
    same_bits: bool
    group: int = 4


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one target."""

    target: str
    kernel: str
    variant: str
    shared_bytes: int
    num_registers: int
    spilled_bytes: int
    code_bytes: int

    @property
    def is_within_limits(self) -> bool:
        """Whether it runs, without keeping registers in memory."""
        return (
            self.shared_bytes <= SHARED_LIMITS[self.target]
            and self.num_registers <= REGISTER_LIMITS[self.target]
            and self.spilled_bytes == 0
        )


DAILY = (
    Variant(128, 128, "bf16", "bf16", has_features=False, same_bits=False),
    Variant(128, 128, "bf16", "int8", has_features=True, same_bits=True),
)
LARGE = Variant(256, 256, "fp16", "fp16", has_features=True, same_bits=False)


def all_variants() -> Iterator[Variant]:
    """Yield every head size, format and feature.

    But float32 queries over codes, which spill on NVIDIA: no model for a GPU is served so.
    """
    dims = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
    formats = [(d, kv) for d in ("fp16", "bf16") for kv in (d, "int8")] + [("fp32", "fp32")]
    for (key, value), (dtype, kv), has_features, same_bits in product(
        dims, formats, (False, True), (False, True)
    ):
        yield Variant(key, value, dtype, kv, has_features, same_bits)


@dataclass(frozen=True)
class Fused:
    """What the kernels around products are compiled for."""

    dtype: str
    weight: str  # numbers, int8 or int4
    width: int = 4096
    dim: int = 128


FUSED = Fused("bf16", "int4")


def all_fused() -> Iterator[Fused]:
    """Yield every format of rows and weights, and heads and rows of some sizes."""
    for dtype, weight in product(DTYPES, ("numbers", "int8", "int4")):
        yield Fused(dtype, weight)
    for width, dim in ((1024, 64), (16384, 256)):
        yield Fused("bf16", "int8", width, dim)


def fused_sources(
    variant: Fused,
) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Yield name, kernel, types of arguments, and constants with options, as the forward has."""
    formats = {"numbers": None, "int8": INT8, "int4": INT4}
    format, rows = formats[variant.weight], POINTERS[variant.dtype]
    named = (
        "stream",
        "addend",
        "output",
        "weight",
        "bias",
        "projected",
        "cosines",
        "sines",
        "rows",
    )
    tensors = dict.fromkeys(named, rows)
    floats = dict.fromkeys(("scale", "epsilon", "offset"), "fp32")
    own = fused_kernels()
    norm = {"HAS_WEIGHT": True, "HAS_BIAS": True, "IS_CENTERED": True, "IS_ROUNDED": True}
    yield "add_norm", own.add_norm, tensors | floats, {
        "PAD": padded(variant.width), "HAS_ADDEND": True, "HAS_NORM": True, "HAS_SCALE": True,
        "num_warps": norm_warps(variant.width), **norm,
    }  # fmt: skip
    yield "turn_heads", own.turn_heads, tensors | floats, {
        "NUM_HEADS": 32, "DIM": variant.dim, "PAD": padded(variant.dim),
        "ROPE_DIM": variant.dim // 2, "IS_HALVES": True, "ARE_ROUNDED": True, "HAS_NORM": True,
        "IS_NORM_LAST": False, "IS_BY_HEAD": True, "num_warps": head_warps(variant.dim), **norm,
    }  # fmt: skip
    yield "activate", own.activate, tensors, {"KIND": 1, "HAS_UP": True, "TILE": GATE_TILE}
    numbers = {"weight": rows if format is None else "*i8" if format.bits == 8 else "*u8"}
    numbers |= {"scales": rows if format is None else "*bf16", "zeros": "*i8", "minima": "*bf16"}
    has_minima = format is not None and format.has_minima
    yield f"multiply {variant.weight}", own.multiply, tensors | numbers, {
        **product_options(format, DTYPES[variant.dtype], has_minima, False), "HAS_BIAS": True,
        "IS_WIDENED": False,
    }  # fmt: skip


def sources(
    variant: Variant, on_amd: bool
) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Yield name, kernel, types of arguments, and constants with options, as the backend has."""
    kept, scales = POINTERS[variant.kv_dtype], "*fp32"
    rows, is_codes = POINTERS[variant.dtype], variant.kv_dtype == "int8"

    def row(dim: int) -> int:
        return dim + 4 * is_codes

    limits = PartLimits.of(
        variant.group,
        max(variant.key_dim, variant.value_dim),
        variant.same_bits,
        DTYPES[variant.dtype].itemsize,
    )
    numbers = dict.fromkeys(
        ("tokens", "positions", "blocks", "parts", "starts", "partials"), "*i32"
    )
    floats = dict.fromkeys(("key_scales", "value_scales", "sinks", "means", "log_sums"), scales)
    tensors = {"queries": rows, "output": rows, "keys": kept, "values": kept, **numbers, **floats}
    scalars = {"scale": "fp32", "soft_cap": "fp32"}
    for tile in sorted({limits.narrow_rows, limits.wide_rows}):
        options = tile_options(
            tile,
            variant.key_dim,
            variant.value_dim,
            DTYPES[variant.dtype],
            limits.section_keys,
            on_amd,
        )
        constants = {
            "KV_HEADS": 8, "GROUP": variant.group, "KEY_DIM": variant.key_dim,
            "VALUE_DIM": variant.value_dim, "KEY_ROW": row(variant.key_dim),
            "VALUE_ROW": row(variant.value_dim), "BLOCK_SIZE": 16, "IS_CODES": is_codes,
            "HAS_CAP": variant.has_features, "HAS_WINDOW": variant.has_features,
            "HAS_SINKS": variant.has_features, "IS_WIDENED": False,
        }  # fmt: skip
        yield f"attend {tile}", kernels().attend, {**tensors, **scalars}, constants | options
    fusion = {"enable_fp_fusion": not variant.same_bits}
    sizes = {"VALUE_DIM": variant.value_dim, "VALUE_PAD": padded(variant.value_dim), "HEADS": 16}
    yield "merge", kernels().merge, tensors, sizes | {"HAS_SINKS": variant.has_features} | fusion
    sizes = {
        "HEADS": 8,
        "DIM": variant.key_dim,
        "PAD": padded(variant.key_dim),
        "TOKENS": store_tokens(variant.key_dim),
    }
    stored = {"rows": rows, "kept": kept, "scales": scales, "slots": "*i64"}
    yield "store", kernels().store, stored, sizes | {
        "ROW": row(variant.key_dim), "IS_CODES": is_codes, "enable_fp_fusion": False,
    }  # fmt: skip


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compile_all(
    variants: tuple[Variant | Fused, ...], targets: tuple[str, ...]
) -> Iterator[Compiled]:
    """Compile; each kernel takes one to three seconds."""
    for variant, target in product(variants, targets):
        if isinstance(variant, Fused):
            kernels_of = fused_sources(variant)
        else:
            kernels_of = sources(variant, target.startswith("gfx"))
        for name, kernel, types, given in kernels_of:
            options = {key: given[key] for key in OPTION_NAMES if key in given}
            constants = {key: value for key, value in given.items() if key not in options}
            signature = {arg: types.get(arg, "i32") for arg in kernel.arg_names}
            signature.update(dict.fromkeys(constants, "constexpr"))
            # Addresses of tensors are multiples of 16, as a launch would see.
            aligned = [["tt.divisibility", 16]]
            attributes = {
                (i,): aligned for i, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*"
            }
            source = ASTSource(kernel, signature, constants, attributes)
            compiled = triton.compile(source, target=TARGETS[target], options=options)
            registers, spilled, size = measure(compiled, target)
            shared = compiled.metadata.shared
            yield Compiled(target, name, str(variant), shared, registers, spilled, size)


def number_of(pattern: str, text: str) -> int:
    """Return the number that a pattern captures."""
    return int(re.findall(pattern, text)[0])


def measure(compiled: Any, target: str) -> tuple[int, int, int]:
    """Return registers, spilled bytes and bytes of code."""
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        numbers = {
            key: number_of(rf"\.{key}:\s+(\d+)", text)
            for key in ("vgpr_count", "agpr_count", "vgpr_spill_count")
        }
        registers = numbers["vgpr_count"]  # those for products included
        return registers, 4 * numbers["vgpr_spill_count"], len(compiled.asm["hsaco"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        used = subprocess.check_output([tools / "cuobjdump", "-res-usage", cubin], text=True)
        registers, stack = (number_of(rf"{name}:(\d+)", used) for name in ("REG", "STACK"))
        spilled = 0
        if stack:  # of a call, or of registers
            ptx.write_text(compiled.asm["ptx"])
            spilled = _spilled_bytes(tools, ptx)
    return registers, spilled, len(compiled.asm["cubin"])


def _spilled_bytes(tools: Path, ptx: Path) -> int:
    """Compile PTX again, by the assembler that knows its version, which tells what it spills."""
    [architecture] = re.findall(r"^\.target (\w+)", ptx.read_text(), re.M)
    for name in ("ptxas", "ptxas-blackwell"):
        command: list[str | Path] = [
            tools / name,
            "-v",
            f"--gpu-name={architecture}",
            ptx,
            "-o",
            ptx.with_suffix(".o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return sum(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    raise RuntimeError(done.stderr)


def main() -> int:
    """Compile and print; the status is 1 if anything exceeds a limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every variant")
    parser.add_argument(
        "--few",
        action="store_true",
        help="without heads of 256 elements and plain or int8 products",
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--target", choices=TARGETS, action="append", help="this target alone")
    arguments = parser.parse_args()
    variants: tuple[Variant | Fused, ...] = (*DAILY, FUSED)
    if not arguments.few:
        variants += (LARGE, Fused("bf16", "numbers"), Fused("bf16", "int8"))
    if arguments.all:
        variants = (*all_variants(), *all_fused())
    failed = 0
    for result in compile_all(variants, tuple(arguments.target or TARGETS)):
        failed += not result.is_within_limits
        if arguments.json:
            fields = asdict(result) | {"is_within_limits": result.is_within_limits}
            print(json.dumps(fields), flush=True)
        else:
            mark = "" if result.is_within_limits else "  BEYOND A LIMIT"
            print(
                f"{result.target:7} {result.kernel:16} {result.shared_bytes:7} B shared "
                f"{result.num_registers:4} registers {result.spilled_bytes:5} B spilled  "
                f"{result.variant}{mark}",
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

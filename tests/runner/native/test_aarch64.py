"""The C++ tests on 64-bit ARM: cross-compiled, and run by an emulator of three processors."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        None in (shutil.which(COMPILER), shutil.which(EMULATOR), shutil.which("cmake")),
        reason="needs the Debian packages g++-aarch64-linux-gnu, qemu-user and cmake",
    ),
]

BEST_OF = {"max": "NEON with BF16", "neoverse-n1": "NEON with SDOT", "cortex-a72": "NEON"}
"""The best instruction set of each emulated processor, as the tests print it."""

CASES: dict[str, list[str]] = {
    name: [] for name in ("store", "ops", "bits", "experts", "plan", "sampling", "attention")
}
"""Tests that are run as by day."""

LONG = {"program": ["4"], "product": ["3"]}
"""Arguments of those that take long under emulation."""


RATES = {
    ("codes_neon_i8mm", "product_codes", "smmla"): 16.0,
    ("codes_neon_dotprod", "product_codes", "sdot"): 7.5,
    ("products_neon_bf16", "product_vectors", "bfmmla"): 6.0,
}
"""Products per instruction that the best loop of a file reaches, see docs/platforms.md."""


def built(folder: Path, *options: str) -> Path:
    """Compile the library and its tests into a folder, and return it."""
    given = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/native/aarch64.cmake", "-DOSTINATO_NATIVE_TESTS=ON"]
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), *given, *options],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library and its tests."""
    return built(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise with the address and undefined behaviour sanitizers."""
    return built(tmp_path_factory.mktemp("sanitized"), "-DOSTINATO_SANITIZE=ON")


def emulate(folder: Path, name: str, processor: str, *arguments: str) -> str:
    """Run a test on an emulated processor; returns what it says."""
    emulated = [EMULATOR, "-cpu", processor, "-L", LIBRARIES, "-E", f"LD_LIBRARY_PATH={folder}"]
    own = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # for leaks it would need ptrace
    command = [*emulated, str(folder / f"test_{name}"), *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("processor", BEST_OF)
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_the_kernels_compute_what_the_definition_says(name: str, processor: str, tests: Path):
    """On each instruction set of the processor; the last line names the best."""
    said = emulate(tests, name, processor, *{**CASES, **LONG}[name])

    if name != "plan":  # which has no vectors
        assert said.splitlines()[-1].startswith(f"{BEST_OF[processor]}:")


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_the_library_is_right_under_the_sanitizers(name: str, sanitized: Path):
    """On all instruction sets, of which each processor has some; with few cases."""
    few = {"bits": [], "product": ["2"], "program": ["2"], "attention": ["5"], "sampling": ["20"]}
    emulate(sanitized, name, "max", *few.get(name, ["10"]))


def test_loops_multiply_as_much_with_an_instruction_as_the_docs_say(tests: Path):
    rates_of = runpy.run_path(str(ROOT / "native/count_products.py"))["rates_of"]
    for (kind, name, instruction), least in RATES.items():
        rates = rates_of(tests / f"CMakeFiles/{kind}.dir/src/{name}.cpp.o")
        assert rates[instruction][1] >= least, rates

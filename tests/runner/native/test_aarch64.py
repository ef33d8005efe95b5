"""The C++ tests on 64-bit ARM: cross-compiled, and run by an emulator of three processors."""

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

BEST_OF = {"max": "NEON with I8MM", "neoverse-n1": "NEON with SDOT", "cortex-a72": "NEON"}
"""The best instruction set of each emulated processor, as the tests print it."""

CASES: dict[str, list[str]] = {
    name: [] for name in ("store", "ops", "bits", "plan", "sampling", "attention")
}
"""Tests that are run as by day."""

LONG = {"program": ["4"], "product": ["3"]}
"""Arguments of those that take long under emulation."""


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library and its tests."""
    build = tmp_path_factory.mktemp("aarch64")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    options = [f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DOSTINATO_NATIVE_TESTS=ON", *target]
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(build), *options],
        ["cmake", "--build", str(build), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build


@pytest.mark.parametrize("processor", BEST_OF)
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_the_kernels_compute_what_the_definition_says(name: str, processor: str, tests: Path):
    """On each instruction set of the processor; the last line names the best."""
    arguments = {**CASES, **LONG}[name]
    emulated = [EMULATOR, "-cpu", processor, "-L", LIBRARIES, "-E", f"LD_LIBRARY_PATH={tests}"]
    command = [*emulated, str(tests / f"test_{name}"), *arguments]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if name != "plan":  # which has no vectors
        assert done.stdout.splitlines()[-1].startswith(f"{BEST_OF[processor]}:")

"""The kernels' own tests: random steps against the definition in float64, on every instruction set.

Arrays end at pages that may not be touched. By default the tests run against the library that is
installed; with the address and undefined behaviour sanitizers they are `nightly`, since all kernels
are compiled anew for that. Where a processor has AVX512_BF16 and no AMX, kernels for AMX run on
emulated tile instructions, by default those of products; the rest of their library is what
`native/compile.py` has compiled. All are compiled once per content of `native/`, in `build/`.
"""

import hashlib
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from ostinato.runner.native.library import PATH
from tests.support.instruction_sets import needs_library

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "native"
BUILDS = ROOT / "build/native-tests"
CPU_FLAGS = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
EMULATES = "avx512_bf16" in CPU_FLAGS and "amx_bf16" not in CPU_FLAGS
WITH_TESTS = ("-DOSTINATO_NATIVE_TESTS=ON", f"-DOSTINATO_EMULATE_AMX={'ON' if EMULATES else 'OFF'}")
PLAIN = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror")

CASES = {
    "store": (40, "40 cases"),
    "attention": (24, "24 cases"),
    "bits": (0, "the bits of every other"),
    "experts": (60, "60 cases"),
    "ops": (60, "60 cases"),
    "program": (30, "30 cases"),
    "plan": (60, "60 cases"),
    "product": (15, "15 cases"),
    "sampling": (200, "200 cases"),
}
"""How many random cases each test draws, and what it says if all are right."""

# Compiling takes minutes where a machine is busy, and others wait for it.
pytestmark = [needs_library, pytest.mark.timeout(3600)]

each_test = pytest.mark.parametrize("name", CASES)


def run(*command: str | Path) -> str:
    """Run a command; returns what it says.

    Raises:
        AssertionError: It failed; with what it said.
    """
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def folder_of(kind: str) -> Path:
    """Return where builds of the present sources by the present compiler go; made if need be.

    Effects: removes builds of the kind that have other sources.
    """
    digest = hashlib.sha256(run("c++", "--version").encode())
    for source in sorted(path for path in NATIVE.rglob("*") if path.is_file()):
        if source.suffix in (".h", ".cpp", ".txt", ".map"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = BUILDS / f"{kind}-{digest.hexdigest()[:16]}"
    for other in BUILDS.glob(f"{kind}-*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def need(*tools: str) -> None:
    """Skip where one of these is missing."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")


@pytest.fixture(scope="module")
def installed() -> Path:
    """The folder with the tests of the library that is installed."""
    need("c++")
    BUILDS.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILDS / "lock"):
        folder = folder_of("installed")
        for name in CASES:
            if not (folder / f"test_{name}").exists():
                compile_test(name, folder)
    return folder


def compile_test(name: str, folder: Path) -> None:
    """Compile one test against the library; it appears when it is whole."""
    includes = ("-I", NATIVE / "include", "-I", NATIVE / "src")
    source, unfinished = NATIVE / f"tests/test_{name}.cpp", folder / f"{name}.unfinished"
    linked = (PATH, f"-Wl,-rpath,{PATH.parent}")
    run("c++", *PLAIN, *includes, source, *linked, "-o", unfinished)
    unfinished.rename(folder / f"test_{name}")


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """The folder with the sanitized library and its tests."""
    need("cmake", "ninja", "c++")
    BUILDS.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILDS / "lock"):
        folder = folder_of("sanitized")
        compile_in(folder, "all", "-DOSTINATO_SANITIZE=ON")
    return folder


@pytest.fixture(scope="module")
def emulated() -> Path:
    """The installation's folder, with a library whose tiles are emulated, and tests of it."""
    if not EMULATES:
        pytest.skip("AMX is emulated where a processor has AVX512_BF16 and no AMX")
    need("cmake", "ninja", "c++")
    folder: Path = runpy.run_path(str(NATIVE / "compile.py"))["build_folder"]()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        compile_in(folder, "test_product test_program")
    return folder


def compile_in(folder: Path, targets: str, *options: str) -> None:
    """Compile tests and what they need; Ninja goes on where it was stopped."""
    run("cmake", "-S", NATIVE, "-B", folder, "-G", "Ninja", *WITH_TESTS, *options)
    said = run("cmake", "--build", folder, "--target", *targets.split())
    assert "warning:" not in said, said


def test_every_test_of_the_kernels_is_run():
    written = {path.stem.removeprefix("test_") for path in (NATIVE / "tests").glob("test_*.cpp")}
    assert written == set(CASES)


@each_test
def test_the_installed_library_computes_what_the_definition_says(name: str, installed: Path):
    cases, said = CASES[name]
    assert said in run(installed / f"test_{name}", str(cases))


@pytest.mark.parametrize("name", ["product", "program"])
def test_products_by_emulated_tiles_are_what_the_definition_says(name: str, emulated: Path):
    assert "AMX: 12 cases" in run(emulated / f"test_{name}", "12", "best alone")


@pytest.mark.nightly
@each_test
def test_the_library_is_right_under_the_sanitizers(name: str, sanitized: Path):
    cases, said = CASES[name]
    assert said in run(sanitized / f"test_{name}", str(cases))


@pytest.mark.nightly
def test_attention_is_right_for_many_steps(sanitized: Path):
    assert "400 cases" in run(sanitized / "test_attention", "400", "1000")

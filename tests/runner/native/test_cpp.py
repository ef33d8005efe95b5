"""Are the kernels right by their own tests, under the address sanitizer?

They are built once, in a folder of their own, and run over every instruction set that this
processor has: random steps against the definition in float64, with arrays that end at pages that
must not be touched. Where a processor has AVX512_BF16 and no AMX, tile instructions are emulated.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native"
CPU_FLAGS = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()


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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sanitized library and its tests."""
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    folder = tmp_path_factory.mktemp("native")
    options = ["-DOSTINATO_NATIVE_TESTS=ON", "-DOSTINATO_SANITIZE=ON"]
    if "avx512_bf16" in CPU_FLAGS and "amx_bf16" not in CPU_FLAGS:
        options.append("-DOSTINATO_EMULATE_AMX=ON")
    run("cmake", "-S", NATIVE, "-B", folder, "-G", "Ninja", *options)
    said = run("cmake", "--build", folder)
    assert "warning:" not in said, said
    return folder


def test_keys_and_values_lie_where_the_layout_says(built: Path) -> None:
    assert "40 cases" in run(built / "test_store", "40")


def test_attention_is_what_the_definition_says_on_every_instruction_set(built: Path) -> None:
    assert "24 cases" in run(built / "test_attention", "24")


def test_what_lies_between_products_is_what_the_definition_says(built: Path) -> None:
    assert "60 cases" in run(built / "test_ops", "60")


def test_a_program_computes_what_its_operations_compute(built: Path) -> None:
    assert "30 cases" in run(built / "test_program", "30")


def test_a_plan_lets_each_row_look_at_each_of_its_keys_once(built: Path) -> None:
    assert "60 cases" in run(built / "test_plan", "60")


def test_products_are_what_the_definition_says_on_every_instruction_set(built: Path) -> None:
    said = run(built / "test_product", "25")
    assert "generic: 25 cases" in said
    assert "AMX: 25 cases" in said or "avx512_bf16" not in CPU_FLAGS


@pytest.mark.nightly
def test_attention_is_right_for_many_steps(built: Path) -> None:
    assert "400 cases" in run(built / "test_attention", "400", "1000")

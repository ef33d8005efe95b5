"""A wheel's tag promises no more than its library keeps."""

import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ostinato.runner.native.library import PATH
from tests.support.build_modules import build_module

MACHINE = platform.machine()

pytestmark = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("objdump")), reason="needs a compiler and binutils"
)


@pytest.fixture(scope="module")
def manylinux() -> ModuleType:
    """Load the build's own module."""
    return build_module("manylinux")


def compiled(folder: Path, source: str, *options: str) -> Path:
    (folder / "a.c").write_text(source)
    library = folder / "a.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(folder / "a.c"), *options]
    subprocess.run(command, check=True, capture_output=True)
    return library


def test_a_library_runs_wherever_the_newest_symbol_that_it_uses_is(
    manylinux: ModuleType, tmp_path: Path
):
    """``getrandom`` came with glibc 2.25."""
    source = "#include <sys/random.h>\nlong f(char *to) { return getrandom(to, 8, 0); }"
    assert manylinux.platform_tag(compiled(tmp_path, source)) == f"manylinux_2_25_{MACHINE}"


def test_a_library_of_old_symbols_has_the_oldest_tag_that_is_given(
    manylinux: ModuleType, tmp_path: Path
):
    source = "#include <stdlib.h>\nvoid *f(void) { return malloc(8); }"
    assert manylinux.platform_tag(compiled(tmp_path, source)) == f"manylinux_2_17_{MACHINE}"


def test_a_library_that_needs_others_promises_nothing(manylinux: ModuleType, tmp_path: Path):
    source = "#include <stdlib.h>\nvoid *f(void) { return malloc(8); }"
    library = compiled(tmp_path, source, "-Wl,--no-as-needed", "-lgomp")
    assert manylinux.platform_tag(library) == f"linux_{MACHINE}"


def test_what_is_no_library_promises_nothing(manylinux: ModuleType, tmp_path: Path):
    (tmp_path / "text.so").write_text("hello")
    assert manylinux.platform_tag(tmp_path / "text.so") == f"linux_{MACHINE}"


@pytest.mark.skipif(not PATH.exists(), reason="there is no native library")
def test_our_own_library_promises_something(manylinux: ModuleType):
    assert re.fullmatch(rf"manylinux_2_\d+_{MACHINE}", manylinux.platform_tag(PATH))


@pytest.mark.parametrize(("code", "machine"), [(62, "x86_64"), (183, "aarch64"), (8, MACHINE)])
def test_a_library_says_which_processor_it_is_for(
    manylinux: ModuleType, tmp_path: Path, code: int, machine: str
):
    """A wheel for ARM may be compiled elsewhere; of an unknown one, this machine is the answer."""
    (tmp_path / "a.so").write_bytes(b"\x7fELF" + bytes(14) + code.to_bytes(2, "little"))
    assert manylinux.machine_of(tmp_path / "a.so") == machine


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a cross compiler")
def test_a_library_that_was_compiled_for_arm_is_tagged_so(manylinux: ModuleType, tmp_path: Path):
    (tmp_path / "a.c").write_text("#include <stdlib.h>\nvoid *f(void) { return malloc(8); }")
    command = ["aarch64-linux-gnu-gcc", "-shared", "-fPIC", "-o", "a.so", "a.c"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert manylinux.platform_tag(tmp_path / "a.so") == "manylinux_2_17_aarch64"

"""The native library: whether it loads, its instruction sets, and the threads that it uses."""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.core.errors import ConfigError
from ostinato.runner.native import library as library_file
from ostinato.runner.native.library import (
    Isa,
    attention_isa,
    best_isa,
    current_isa,
    library,
    requested_isa,
    use_isa,
)
from tests.support.instruction_sets import ISAS, needs_library


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    """Load the library again in this test; the instruction set in use stays what it was."""
    before = None if (native := library()) is None else current_isa(native)
    library.cache_clear()
    yield
    library.cache_clear()
    if native is not None and before is not None:
        use_isa(native, before)


def test_every_instruction_set_below_the_best_can_be_used(isa: Isa):
    native = library()
    assert native is not None
    assert current_isa(native) == attention_isa(native) == isa <= best_isa(native)


@needs_library
def test_an_instruction_set_that_the_processor_lacks_is_refused():
    native = library()
    assert native is not None
    if best_isa(native) == Isa.AMX:
        pytest.skip("this processor has them all")

    with pytest.raises(ValueError, match="this processor has"):
        use_isa(native, Isa.AMX)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_chooses_the_instruction_set(
    isa: Isa, loaded_anew: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OSTINATO_ISA", isa.name.lower())

    native = library()

    assert native is not None
    assert (current_isa(native), attention_isa(native)) == (isa, isa)


@needs_library
@pytest.mark.parametrize("name", ["avx3", "4", "sse"])
def test_an_unknown_instruction_set_in_the_environment_is_refused_with_those_there_are(
    name: str, loaded_anew: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OSTINATO_ISA", name)

    with pytest.raises(ConfigError, match=f"OSTINATO_ISA={name}: this machine runs generic"):
        library()


def test_an_instruction_set_that_the_machine_lacks_is_refused_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("OSTINATO_ISA", "amx")

    with pytest.raises(ConfigError, match="OSTINATO_ISA=amx: this machine runs generic, avx2; set"):
        requested_isa(Isa.AVX2)
    assert requested_isa(Isa.AMX) is Isa.AMX
    monkeypatch.setenv("OSTINATO_ISA", "AVX2")
    assert requested_isa(Isa.AMX) is Isa.AVX2


def test_an_arm_processor_has_the_sets_of_arm_that_its_best_one_contains(
    monkeypatch: pytest.MonkeyPatch,
):
    """The library numbers them from 1, as those of x86-64; codes are in blocks from SDOT on."""
    names = [isa.name.lower() for isa in Isa.NEON_I8MM.contained]
    assert names == ["generic", "neon", "neon_dotprod", "neon_i8mm"]
    monkeypatch.setenv("OSTINATO_ISA", "neon_i8mm")
    assert requested_isa(Isa.NEON_BF16) is Isa.NEON_I8MM
    monkeypatch.setattr(library_file, "ON_ARM", True)
    assert [Isa.of_level(level) for level in range(5)] == Isa.NEON_BF16.contained
    in_blocks = [isa for isa in Isa if isa.multiplies_blocks]
    assert in_blocks == [Isa.NEON_DOTPROD, Isa.NEON_I8MM, Isa.NEON_BF16]


def test_an_empty_variable_leaves_the_choice_to_the_processor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OSTINATO_ISA", "")
    assert requested_isa(Isa.AVX512) is None


@needs_library
def test_a_library_of_another_version_is_not_used_and_it_is_said(
    loaded_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(library_file, "ABI_VERSION", 10**6)

    assert library() is None
    [said] = caplog.messages
    assert "but 1000000 is needed" in said and "run `python native/compile.py`" in said
    library.cache_clear()
    monkeypatch.setattr(library_file, "COMPILER", library_file.PATH / "nowhere")
    assert library() is None and "install a C++ compiler" in caplog.messages[1]


@pytest.mark.parametrize(
    "source", ["int ost_abi_version(void) { return VERSION; }", "int other(void) { return 1; }"]
)
def test_a_library_that_lacks_a_symbol_is_not_used_and_it_is_said_once(
    source: str,
    loaded_anew: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """As it stands after a pull, before it is compiled again."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "old.c").write_text(source.replace("VERSION", str(library_file.ABI_VERSION)))
    old = tmp_path / "libostinato_native.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(old), str(tmp_path / "old.c")]
    subprocess.run(command, check=True)
    monkeypatch.setattr(library_file, "PATH", old)

    assert library() is None and library() is None
    [said] = caplog.messages
    assert "older than the Python around it" in said and "python native/compile.py" in said


@needs_library
def test_the_library_brings_no_threads_of_its_own():
    """Two OpenMP runtimes would spin against each other: torch's lends its threads."""
    script = (
        "from ostinato.runner.native.library import library\n"
        "assert library() is not None\n"
        "print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout

    runtimes = set(re.findall(r"\S*/lib(?:gomp|omp|iomp)\S*", maps))
    assert "libostinato_native.so" in maps
    assert len(runtimes) <= 1, runtimes


def test_records_are_as_large_as_the_headers():
    """Bytes that a C compiler gives these structures where pointers have eight."""
    from ostinato.runner.native.ctypes_api import ITEM, SEGMENT, AttentionArgs, Kv, Rows

    assert (SEGMENT.itemsize, ITEM.itemsize) == (24, 28)
    assert (ctypes.sizeof(Kv), ctypes.sizeof(Rows), ctypes.sizeof(AttentionArgs)) == (48, 32, 224)


@needs_library
@pytest.mark.parametrize(
    ("best", "vendor", "expected"),
    [
        (Isa.AVX512_BF16, b"GenuineIntel", Isa.AVX512),
        (Isa.AVX512_BF16, b"AuthenticAMD", Isa.AVX512_BF16),
        (Isa.AMX, b"GenuineIntel", Isa.AMX),
        (Isa.AVX2, b"GenuineIntel", Isa.AVX2),
    ],
)
def test_attention_multiplies_pairs_where_that_is_faster(best: Isa, vendor: bytes, expected: Isa):
    native = library()
    assert native is not None
    assert native.ost_attention_isa_of(int(best), vendor) == expected


@needs_library
def test_the_library_loads_wherever_torch_does():
    """It needs no newer glibc and libstdc++ than torch's own wheels (manylinux_2_28)."""
    needed = re.findall(rb"\0(GLIBC|GLIBCXX)_([0-9.]+)(?=\0)", library_file.PATH.read_bytes())
    newest: dict[bytes, tuple[int, ...]] = {b"GLIBC": (0,), b"GLIBCXX": (0,)}
    for name, version in needed:
        newest[name] = max(newest[name], tuple(map(int, version.split(b"."))))

    assert (0,) < newest[b"GLIBC"] <= (2, 28)
    assert newest[b"GLIBCXX"] <= (3, 4, 22)

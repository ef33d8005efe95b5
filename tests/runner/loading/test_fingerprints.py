"""A checkpoint's fingerprint is remembered until one of its files changes."""

import os
import shutil
from pathlib import Path

import pytest

from ostinato.runner.checkpoints import fingerprints
from ostinato.runner.checkpoints.checkpoint import fingerprint, weight_files
from ostinato.runner.checkpoints.fingerprints import fingerprinting, memory_file
from tests.support.models.checkpoints import Checkpoints


@pytest.fixture
def old(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that is remembered, although it is small and new."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(fingerprints, "SETTLED_NS", -(10**18))
    return Path(shutil.copytree(checkpoints.path("llama"), tmp_path / "model"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints whose bytes are read."""
    paths: list[Path] = []

    def count(path: Path, *arguments: object) -> bytes:
        paths.append(path)
        return fingerprint(path, *arguments)

    monkeypatch.setattr(fingerprints, "fingerprint", count)
    return paths


def fingerprint_of(path: Path) -> bytes:
    with fingerprinting(path, weight_files(path)) as result:
        return result()


def test_a_second_time_no_byte_is_read(old: Path, computed: list[Path]):
    first = fingerprint_of(old)

    assert fingerprint_of(old) == first == fingerprint(old, weight_files(old))
    assert len(computed) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_the_same_size_and_time_with_other_content_is_read(
    name: str, old: Path, computed: list[Path]
):
    """A change also has a time that no program sets."""
    before, state = fingerprint_of(old), (old / name).stat()
    content = bytearray((old / name).read_bytes())
    content[-2] ^= 1
    (old / name).write_bytes(content)
    os.utime(old / name, ns=(state.st_atime_ns, state.st_mtime_ns))

    assert fingerprint_of(old) != before and len(computed) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_memory_is_written_anew(damage: bytes, old: Path, computed: list[Path]):
    first = fingerprint_of(old)
    memory_file().write_bytes(damage)

    assert [fingerprint_of(old), fingerprint_of(old)] == [first, first]
    assert len(computed) == 2


def test_no_more_are_remembered_than_the_limit(old: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprints, "MAX_ENTRIES", 3)
    for time in range(5):
        os.utime(old / "config.json", (time, time))
        fingerprint_of(old)

    assert memory_file().read_text().count(":") == 3


def test_a_new_file_is_not_remembered(
    old: Path, computed: list[Path], monkeypatch: pytest.MonkeyPatch
):
    """It may change again within one step of the file system's clock."""
    monkeypatch.setattr(fingerprints, "SETTLED_NS", 10**12)

    assert fingerprint_of(old) == fingerprint_of(old)
    assert len(computed) == 2 and not memory_file().exists()


def test_without_a_folder_to_write_into_it_is_computed_each_time(
    old: Path, tmp_path: Path, computed: list[Path]
):
    (tmp_path / "cache").write_text("a file where a folder should be")

    assert fingerprint_of(old) == fingerprint_of(old)
    assert len(computed) == 2

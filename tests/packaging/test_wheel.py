"""What ``pip install ostinato`` would do: build, install into an empty environment, run.

It installs torch, so it runs at night: ``pytest -m nightly tests/packaging``.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "ostinato/runner/native/libostinato_native.so"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def pip(python: Path | str, *arguments: str, **environment: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def without_compilers(folder: Path) -> str:
    """Return a PATH that has everything but compilers."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for tool in Path(directory).glob("*"):
            link = folder / tool.name
            if not re.search(r"(cc|\+\+|clang|cpp)([-\d.]*)$", tool.name) and not link.exists():
                link.symlink_to(tool)
    return str(folder)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [archive] = folder.glob("ostinato-*.tar.gz")
    return archive


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_wheel_from_the_source_archive_runs_in_an_empty_environment(sdist: Path, tmp_path: Path):
    pip(sys.executable, "wheel", "--no-deps", "-w", str(tmp_path), str(sdist))
    [wheel] = tmp_path.glob("*.whl")
    assert re.search(r"py3-none-manylinux_2_\d+_x86_64\.whl$", wheel.name), wheel.name
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"

    pip(python, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))

    check = [str(python), str(ROOT / "packaging/check_wheel.py")]
    said = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "with native library" in said


def test_the_source_archive_builds_without_a_compiler(sdist: Path, tmp_path: Path):
    """Then it is a wheel for every platform, and attention runs in plain torch."""
    path = without_compilers(tmp_path / "bin")
    pip(sys.executable, "wheel", "--no-deps", "-w", str(tmp_path), str(sdist), PATH=path, CXX="")

    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()

"""The two commands do what README and CONTRIBUTING say of them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docs.reading import ROOT

SCRIPTS = ["scripts/setup", "scripts/demo", "scripts/check", "scripts/install-browser", ".ci/run"]
GATES = ["lint", "types", "imports", "tests", "docs"]


def check(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run scripts/check with arguments that end before any set-up."""
    return subprocess.run(
        [ROOT / "scripts/check", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid_and_can_be_started(name: str):
    """A lost executable bit is the most common way to break a README."""
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_ci_calls_the_same_command_as_people_do():
    """And has no other line of substance."""
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line[:1] != "#"]
    assert len(lines) == 2
    assert "scripts/check" in lines[1]


def test_check_lists_its_gates_from_any_folder(tmp_path: Path):
    """The names that it takes are those that CONTRIBUTING.md lists."""
    assert check("--list", cwd=tmp_path).stdout.split() == GATES
    assert f"every gate: {', '.join(GATES)}." in (ROOT / "CONTRIBUTING.md").read_text()


def test_check_refuses_a_gate_that_it_does_not_know():
    """It names the wrong word and the right ones, and runs nothing."""
    refused = check("lint", "typos")
    assert refused.returncode == 2
    assert "typos" in refused.stderr
    assert ", ".join(GATES) in refused.stderr.replace(" ", ", ").replace(",,", ",")


@pytest.fixture
def small_copy(tmp_path: Path) -> Path:
    """A repository in which everything is installed already."""
    root = tmp_path.resolve() / "a copy"
    for name in ("scripts", "native"):
        (root / name).mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup"):
        shutil.copy(ROOT / name, root / name)
    base = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    subprocess.run([base, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    hashed = "find pyproject.toml constraints.txt native -type f ! -name '*.pyc' -print0 | sort -z"
    installed = subprocess.run(
        ["bash", "-c", f"{hashed} | xargs -0 sha256sum | sha256sum"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (root / ".venv/setup.installed").write_text(installed)
    (root / ".venv/setup.origin").write_text(f"{base} {root}\n")
    (root / ".venv/kept").touch()
    return root


@pytest.mark.parametrize("first", [".venv/bin", ""])
def test_setup_keeps_an_environment_that_is_on_the_path(small_copy: Path, first: str):
    """In an activated environment its Python is first on the path, and it is made by another."""
    path = [str(small_copy / first), *os.environ["PATH"].split(os.pathsep)]
    base = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    environment = {**os.environ, "PATH": os.pathsep.join(path)}
    environment |= {} if first else {"PYTHON": base}
    done = subprocess.run(
        [small_copy / "scripts/setup"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (small_copy / ".venv/kept").exists(), "it was made anew"
    assert not done.stderr


def requirements() -> list[Requirement]:
    """What the base install and the development extra ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]
    ]


def pins() -> dict[str, str]:
    """Package to version, from constraints.txt; any other kind of line is an error."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    rows = [re.fullmatch(r"([\w.-]+)==([\w.!]+)", line) for line in lines if line[:1] != "#"]
    assert all(rows), "only `name==version`: no addresses, no local versions such as +cpu"
    return {canonicalize_name(row[1]): row[2] for row in rows if row}


def test_constraints_pin_every_requirement_within_its_range():
    """What was tested must be something that pyproject.toml allows."""
    for requirement in requirements():
        pinned = pins().get(canonicalize_name(requirement.name))
        assert pinned, f"{requirement.name} is not pinned"
        assert Version(pinned) in requirement.specifier, f"{requirement} excludes {pinned}"

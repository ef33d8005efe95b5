"""Installs agents from npm and PyPI, each in a folder of its own, once for all tests."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.clients import AgentClient

_INSTALL_S = 1200


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
        digest = hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:12]
        folder = self._root / f"{client.source}-{digest}"
        done = folder / "installed"
        if not done.exists():
            (_from_npm if client.source == "npm" else _from_pypi)(folder, client)
            done.touch()
        return folder


def version_of(folder: Path, client: AgentClient) -> str:
    """Return the installed version of an agent."""
    if client.source == "npm":
        path = folder / "node_modules" / client.packages[0] / "package.json"
        return re.search(r'"version":\s*"([^"]+)"', path.read_text())[1]
    name = client.packages[0].split("[")[0].replace("-", "_")
    [metadata] = folder.glob(f"lib/python*/site-packages/{name}-*.dist-info/METADATA")
    return re.search(r"^Version: (.+)$", metadata.read_text(), re.MULTILINE)[1]


def _from_npm(folder: Path, client: AgentClient) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    _run(npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages)


def _from_pypi(folder: Path, client: AgentClient) -> None:
    python = next(filter(_runs, _interpreters(client.python)), None)
    if python is None:
        pytest.skip(f"{client.name} needs {client.python}, which is not installed")
    _run(python, "-m", "venv", str(folder))
    _run(str(folder / "bin/pip"), "install", "--quiet", *client.packages)


def _interpreters(name: str) -> Iterator[str]:
    """Yield interpreters of a name: on the path, where it may be a shim, and pyenv's."""
    if on_path := shutil.which(name):
        yield on_path
    versions = Path.home().glob(f".pyenv/versions/{name.removeprefix('python')}*/bin/python")
    yield from map(str, sorted(versions))


def _runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _run(*command: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        command, env=environment, timeout=_INSTALL_S, capture_output=True, check=False
    )
    if result.returncode:
        print(result.stderr.decode()[-2000:], file=sys.stderr)
        pytest.fail(f"{' '.join(command)[:200]} failed")

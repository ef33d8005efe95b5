"""Servers of stores on this machine: Valkey or Redis, S3 by ``moto``, Azure's by ``azurite``."""

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
AZURITE = os.environ.get("OSTINATO_AZURITE", "azurite-blob")
"""The command of the emulator, which npm installs."""

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Known to everyone who uses the emulator."""


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a server on a socket in a folder; yields its URL."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program, "there is no valkey-server or redis-server: run scripts/install-server"
    options = ["--port", "0", "--unixsocket", f"{folder}/socket", "--dir", str(folder)]
    options += ["--save", "", "--maxmemory-policy", "noeviction"]
    with _process([program, *options]) as process:
        assert process.stdout
        next(line for line in process.stdout if "ccept connections" in line)
        yield f"unix://{folder}/socket"


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Serve a bucket; its address and keys are in the environment meanwhile."""
    pytest.importorskip("moto", reason="pip install 'ostinato[nightly]'")
    with (
        _process([sys.executable, "-c", _S3_SERVER]) as process,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert process.stdout
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        _put(f"{endpoint}/bucket", {})
        yield "s3://bucket"


@contextmanager
def azure_container() -> Iterator[str]:
    """Serve a container; its address and key are in the environment meanwhile."""
    command = shutil.which(AZURITE)
    if command is None:
        pytest.skip(f"{AZURITE} is not there: npm install --global azurite")
    options = [
        "--inMemoryPersistence",
        "--blobPort",
        "0",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    with _process([command, *options]) as process, pytest.MonkeyPatch.context() as patch:
        assert process.stdout
        said = next(line for line in process.stdout if "successfully listens" in line)
        endpoint = f"{said.split()[-1]}/{_ACCOUNT}"
        patch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", _ACCOUNT)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _KEY)
        _put(f"{endpoint}/bucket?restype=container", _signed("bucket"))
        yield "az://bucket"


def _signed(container: str) -> dict[str, str]:
    """Return the headers with which Azure's key makes a container."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    lines += [f"/{_ACCOUNT}/{_ACCOUNT}/{container}", "restype:container"]
    digest = hmac.digest(base64.b64decode(_KEY), "\n".join(lines).encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    return {**headers, "Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Type": ""}


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _put(url: str, headers: dict[str, str]) -> None:
    make = urllib.request.Request(url, method="PUT", data=b"", headers=headers)
    urllib.request.urlopen(make).close()

"""A process of Valkey or Redis, for tests."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a server on a socket in a folder; yields its URL."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    assert program, "there is no valkey-server or redis-server: run scripts/install-server"
    socket = folder / "socket"
    command = [program, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    process = subprocess.Popen(
        [*command, "--save", "", "--maxmemory-policy", "noeviction"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            if "ccept connections" in line:
                break
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.communicate()

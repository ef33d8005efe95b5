"""`ostinato serve` as a process of its own, as users and supervisors start and end it.

::

    with served("tiny-shakespeare", "--num-blocks", "64") as server:
        httpx.get(f"{server.url}/health")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_ADDRESS = re.compile(r"(http://\S+)/v1")
_PATIENCE_S = 60


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: Its address.
        lines: What it has said so far.
    """

    process: "subprocess.Popen[str]"
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(_PATIENCE_S)


@contextmanager
def served(*arguments: str, command: str = "serve") -> Iterator[Served]:
    """Run ``ostinato serve``, or another command, on a free port until the block is left."""
    command_line = [sys.executable, "-m", "ostinato.cli", command, *arguments, "--port", "0"]
    process = subprocess.Popen(
        command_line, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    server = Served(process)
    started = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(line)
            if found := _ADDRESS.search(line):
                server.url = found[1]
                started.set()
        started.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        started.wait(_PATIENCE_S)
        assert server.url, f"the server did not start: {''.join(server.lines)}"
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()

"""A reader's session: README's blocks as pasted, in order, where another server runs.

``python -m tests.docs.readme_session FOLDER`` runs it in a folder that looks like a clone, and
``in_own_network``: the blocks listen on the ports that they name.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.docs.reading import ROOT, code_blocks

README = ROOT / "README.md"
PATIENCE_S = 120
PROMPT = {"model": "tiny-shakespeare", "prompt": "To be, or not " * 8, "max_tokens": 2}

_OWN_NETWORK = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:  # brings up the loopback: 0x8914 is SIOCSIFFLAGS
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def in_own_network(*command: str) -> list[str]:
    """Return a command that runs another one in a network with nothing but a loopback."""
    return ["unshare", "--map-root-user", "--net", sys.executable, "-c", _OWN_NETWORK, *command]


@contextmanager
def running(command: str, port: int) -> Iterator[None]:
    """Run a server until the block is left, which ends it as Ctrl-C does."""
    process = subprocess.Popen(["bash", "-c", f"exec {command}"])
    try:
        transport = httpx.HTTPTransport(retries=9)  # for minutes; it listens, then loads
        with httpx.Client(transport=transport, timeout=PATIENCE_S) as http:
            assert http.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        assert process.poll() is None, f"it ended: {command}"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, command


def prefixes_survive_a_restart(command: str, port: int) -> None:
    """Run the block with the disk twice: the second server finds what the first has cached."""
    for expected in (0, 96):
        with running(command, port):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=PROMPT, timeout=60)
            usage = answer.json()["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == expected, usage


def run_session(folder: Path) -> None:
    """Run every block, in order, but for those that set up the repository."""
    program = "\n".join(block.text for block in code_blocks(README, "python"))
    for block in code_blocks(README, "bash"):
        port = re.search(r"^ostinato serve .*--port (\d+)", block.text)
        if block.text.startswith("scripts/"):
            continue
        if port is None:
            text = f"set -e\n{block.text}\nkill $(jobs -p) && wait || true"
            done = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, text=True)
            assert done.returncode == 0, block.text
            print(done.stdout)
        elif "--kv-disk" in block.text:
            prefixes_survive_a_restart(block.text.strip(), int(port[1]))
        else:
            with running(block.text.strip(), int(port[1])):
                subprocess.run([sys.executable, "-c", program], check=True)


def main(folder: Path) -> None:
    """Make a folder like a clone, and run the session in it."""
    (folder / "bin").mkdir()
    command = folder / "bin/ostinato"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ostinato.cli "$@"\n')
    command.chmod(0o755)
    (folder / "docs").symlink_to(ROOT / "docs")
    os.chdir(folder)
    os.environ |= {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder)}
    with running("ostinato serve --port 8000 --num-blocks 64", 8000):  # another's
        run_session(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

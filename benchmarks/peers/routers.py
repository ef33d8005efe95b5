"""Other projects' routers in the simulated fleet: their own processes, before stub workers.

A request of the simulation is an HTTP request through the router. The stub worker that gets it
says so, and answers when the simulated request ends, so that the router sees the load of simulated
time: what runs, runs. Neither router looks at a clock when it chooses; both are started with their
defaults for ``cache_aware``. A block of the trace is a text of 32 characters.

Dynamo's ``SelectionService`` is asked for each request, in a process of its own, and gets the
replicas' KV events over ZeroMQ, with its defaults (``workers/dynamo_selection.py``).

They are installed into an environment of their own::

    python -m venv routers
    routers/bin/pip install sglang-router==0.3.2 vllm-router==0.1.17 ai-dynamo-runtime==1.6.1 pyzmq
"""

import base64
import hashlib
import http.client
import json
import os
import queue
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from benchmarks.peers.workers.http_client import free_port, wait_until_ready
from ostinato.lab.simulate.timed_replay import spell
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.observe.events import BlockRemoved, BlockStored, Event, EventBatch

MODULES = {
    "sglang-router": "sglang_router.launch_router",
    "vllm-router": "vllm_router.launch_router",
}
"""What starts each of those that route HTTP."""

DYNAMO = "dynamo"
NAMES = (*MODULES, DYNAMO)

PATIENCE_S = 60.0
"""For anything that has to happen in the real world."""


class Peer:
    """A dispatcher of the simulation; there are no outages here."""

    def close(self) -> None:
        """Stop its process."""

    def failed(self, number: int, now_s: float) -> None:
        """Nothing."""

    def lost(self, replica: int, now_s: float) -> None:
        """Nothing."""

    def back(self, replica: int, now_s: float) -> None:
        """Nothing."""


class DynamoRouter(Peer):
    """Asks Dynamo's ``SelectionService``."""

    def __init__(self, python: Path, trace: BlockTrace, num_replicas: int, num_blocks: int) -> None:
        """Start it, and wait until it serves."""
        self._trace = trace
        worker = Path(__file__).parent / "workers" / "dynamo_selection.py"
        sizes = map(str, (num_replicas, trace.block_tokens, num_blocks))
        self._process = subprocess.Popen(
            [python, worker, *sizes],
            env={**os.environ, "DYN_LOG": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready", "it starts"

    def close(self) -> None:
        """Stop its process."""
        self._process.communicate()

    def route(self, number: int, now_s: float) -> int:
        """Ask for a replica."""
        self._tell("route", number, list(spell(self._trace, number)))
        return int(self._read())

    def first_token(self, number: int, now_s: float) -> None:
        """Say that a prompt is computed."""
        self._tell("first_token", number)

    def finished(self, number: int, now_s: float) -> None:
        """Say that a request ended."""
        self._tell("finished", number)

    def events(self, replica: int, batch: EventBatch, now_s: float) -> None:
        """Publish a replica's events."""
        payload = msgspec.msgpack.encode([now_s, list(map(_written, batch.events)), 0])
        self._tell("events", replica, batch.sequence, base64.b64encode(payload).decode())

    def _tell(self, *what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class HttpRouter(Peer):
    """Asks a router's process over HTTP."""

    def __init__(self, python: Path, name: str, trace: BlockTrace, num_replicas: int) -> None:
        """Start the stub workers and the router, and wait until it serves."""
        self._trace = trace
        self._arrived: queue.Queue[tuple[int, int]] = queue.Queue()
        self._ended: dict[int, threading.Event] = {}
        self._callers: dict[int, threading.Thread] = {}
        self._stubs = [self._stub(place) for place in range(num_replicas)]
        self._port = free_port()
        urls = [f"http://127.0.0.1:{stub.server_address[1]}" for stub in self._stubs]
        command: list[str | Path] = [python, "-m", MODULES[name], "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--prometheus-port", str(free_port())]
        command += ["--max-concurrent-requests", "4096", "--policy", "cache_aware"]
        self._process = subprocess.Popen(
            [*command, "--worker-urls", *urls],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until_ready(f"http://127.0.0.1:{self._port}/readiness", self._process)
        time.sleep(2)  # all workers are registered one by one

    def close(self) -> None:
        """Stop all of it."""
        self._process.terminate()
        self._process.wait()
        for stub in self._stubs:
            stub.shutdown()

    def route(self, number: int, now_s: float) -> int:
        """Send a request; returns the stub that got it."""
        self._ended[number] = threading.Event()
        caller = threading.Thread(target=self._call, args=(number,), daemon=True)
        self._callers[number] = caller
        caller.start()
        request, place = self._arrived.get(timeout=PATIENCE_S)
        assert request == number, "one request is routed at a time"
        return place

    def first_token(self, number: int, now_s: float) -> None:
        """Nothing: they do not look at it."""

    def finished(self, number: int, now_s: float) -> None:
        """Let the stub answer, and wait until the router has passed it on."""
        self._ended.pop(number).set()
        self._callers.pop(number).join(PATIENCE_S)

    def events(self, replica: int, batch: EventBatch, now_s: float) -> None:
        """Nothing: ``cache_aware`` uses its own decisions."""

    def _call(self, number: int) -> None:
        body = {"model": "stub", "prompt": _text(self._trace, number), "seed": number}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.getresponse().read()
        connection.close()

    def _stub(self, place: int) -> ThreadingHTTPServer:
        router = self

        class Stub(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"data": [{"id": "stub", "object": "model"}], "model_path": "stub"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    tokens = list(body.get("prompt", "").encode())
                    self._answer({"tokens": tokens, "count": len(tokens), "max_model_len": 2**20})
                    return
                if self.path != "/v1/completions":  # rendering, which vLLM has behind a flag
                    self.send_error(404)
                    return
                ended = router._ended[body["seed"]]
                router._arrived.put((body["seed"], place))
                ended.wait()
                self._answer({"id": "1", "object": "text_completion", "choices": []})

            def _answer(self, answer: dict[str, object]) -> None:
                written = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(written)))
                self.end_headers()
                self.wfile.write(written)

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        server = Server(("127.0.0.1", 0), Stub)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


def _written(event: Event) -> list[object]:
    """Return an event as vLLM writes it, with hashes as integers: bytes are not understood."""
    if isinstance(event, BlockStored):
        parent = None if event.parent is None else _integer(event.parent)
        hashes = list(map(_integer, event.digests))
        return ["BlockStored", hashes, parent, list(event.tokens), event.block_size, None, "GPU"]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", list(map(_integer, event.digests)), "GPU"]
    return ["AllBlocksCleared"]


def _integer(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _text(trace: BlockTrace, number: int) -> str:
    """Write a prompt with 32 characters per block; the rest of it is its own."""
    blocks = [hashlib.md5(b"%d" % block).hexdigest() for block in trace.path(number).tolist()]
    own = int(trace.input_tokens[number]) - len(blocks) * trace.block_tokens
    rest = hashlib.md5(b"own %d" % number).hexdigest()
    return "".join(blocks) + rest[: max(1, round(32 * own / trace.block_tokens))]

"""Latency that the router adds to a request: stub workers and a steady load.

Requests arrive in equal distances, whatever became of those before them (an open loop), by turns
through the router and straight at a worker, so that both see the same machine::

    python -m benchmarks.router.overhead                     # 500 requests/s, 4 workers
    python -m benchmarks.router.overhead --requests 1000000 --at-once 16 --tracked 200000  # memory

With ``--at-once`` so many connections send one request after another (a closed loop), as fast as
the machine allows; ``--tracked`` bounds the prefixes known, of which one request in ten has a new
one.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from benchmarks.command_line import parser_of
from benchmarks.peers.workers.http_client import free_port, running

_ANSWER = b'{"id": "cmpl-1", "choices": [{"text": "ay"}], "usage": {"prompt_tokens": 9}}'
_SYSTEM = "Thou art a helpful player. " * 40
_NUM_CONVERSATIONS = 64


def main() -> None:
    """Measure, and print a table."""
    options = parser_of(__doc__)
    options.add_argument("--rate", type=float, default=500.0, help="Requests per second.")
    options.add_argument("--requests", type=int, default=10_000, help="Through the router.")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--policy", default="cache_state")
    options.add_argument("--tokenizer", default=None, help="As of `ostinato route`.")
    options.add_argument("--direct", type=float, default=0.2, help="Share sent past the router.")
    options.add_argument("--at-once", type=int, default=0, help="Closed loop; 0 keeps the rate.")
    options.add_argument("--tracked", type=int, default=16_000_000, help="Tokens of prefixes.")
    given = options.parse_args()
    ports = [free_port() for _ in range(given.workers + 1)]
    stubs = multiprocessing.Process(target=_run_stubs, args=(ports[1:],), daemon=True)
    stubs.start()
    with running(_router_command(ports, given), f"http://127.0.0.1:{ports[0]}/ready") as router:
        asyncio.run(_measure(ports, given, router.pid))


@dataclass
class _Seen:
    """Latencies in milliseconds."""

    routed: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    failed: int = 0


async def _measure(ports: list[int], given: argparse.Namespace, router: int) -> None:
    seen, rows = _Seen(), []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        every = max(2, round(1 / given.direct)) if given.direct else 0
        cpu_s = _cpu_s(router)
        running: set[asyncio.Task[None]] = set()
        begin = time.perf_counter()
        for number in range(given.requests):
            delay = begin + number / given.rate - time.perf_counter()
            if given.at_once:
                while len(running) >= given.at_once:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            elif delay > 0:
                await asyncio.sleep(delay)
            if every and number % every == 0:
                port, into = ports[1 + number % given.workers], seen.direct
            else:
                port, into = ports[0], seen.routed
            task = asyncio.create_task(_send(session, port, number, into, seen))
            running.add(task)
            task.add_done_callback(running.discard)
            if (number + 1) % max(1, given.requests // 10) == 0:
                rows.append((number + 1, _rss_mib(router)))
        await asyncio.gather(*running)
        cpu_ms = (_cpu_s(router) - cpu_s) * 1000 / max(1, len(seen.routed))
    _print(seen, rows, cpu_ms, given)


async def _send(
    session: aiohttp.ClientSession, port: int, number: int, into: list[float], seen: _Seen
) -> None:
    conversation = number % _NUM_CONVERSATIONS
    body = {
        "model": "stub",
        "messages": [
            {"role": "system", "content": _SYSTEM + (str(number) * 9 if number % 10 == 0 else "")},
            {"role": "user", "content": f"conversation {conversation}"},
            {"role": "assistant", "content": "ay " * 20},
            {"role": "user", "content": f"turn {number}"},
        ],
    }
    begin = time.perf_counter()
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with session.post(url, json=body) as answer:
            await answer.read()
            if answer.status != 200:
                seen.failed += 1
    except aiohttp.ClientError:
        seen.failed += 1
    if len(into) < 1_000_000:
        into.append((time.perf_counter() - begin) * 1000)


def _print(
    seen: _Seen, rows: list[tuple[int, float]], cpu_ms: float, given: argparse.Namespace
) -> None:
    load = f"{given.at_once} at once" if given.at_once else f"{given.rate:g} requests/s"
    print(f"{load}, {given.workers} stub workers, {given.policy}, "
          f"{seen.failed} failed, {cpu_ms:.2f} ms of processor time per request")  # fmt: skip
    print(f"{'':12}{'median':>10}{'p99':>10}  ms")
    for name, values in (("direct", seen.direct), ("routed", seen.routed)):
        if values:
            print(f"{name:12}{statistics.median(values):10.2f}{_p99(values):10.2f}")
    if seen.direct:
        median = statistics.median(seen.routed) - statistics.median(seen.direct)
        print(f"{'overhead':12}{median:10.2f}{_p99(seen.routed) - _p99(seen.direct):10.2f}")
    print("memory, MiB: " + ", ".join(f"{mib:.0f} at {number:,}" for number, mib in rows))


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _router_command(ports: list[int], given: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "ostinato.cli", "route", "--port", str(ports[0])]
    command += ["--policy", given.policy, "--max-tracked-tokens", str(given.tracked)]
    for port in ports[1:]:
        command += ["--worker", f"http://127.0.0.1:{port}"]
    if given.tokenizer:
        command += ["--tokenizer", given.tokenizer]
    return command


def _run_stubs(ports: list[int]) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=_ANSWER, content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def serve() -> None:
        for port in ports:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", answer)
            app.router.add_get("/health", health)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()

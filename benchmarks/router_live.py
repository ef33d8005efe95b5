"""Hits of four small engines behind the router, live.

Conversations grow turn by turn, several at once, through a router of each policy and fresh
engines; tokens are counted as the engines report them, so a busy machine changes nothing::

    python -m benchmarks.router_live
    python -m benchmarks.router_live --engines 2 --policies cache_state round_robin

``one pool`` is a single engine with the memory of all.
"""

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.command_line import parser_of
from benchmarks.peers.workers.http_client import free_port

_TOWNS = ("Verona", "Mantua", "Padua", "Venice")
_SYSTEMS = [f"{town}, a public place. Enter several citizens of {town}. " * 4 for town in _TOWNS]
"""In letters: the bundled model has one token for all digits, so numbers tell nothing apart."""

_LINES = ["Speak, I pray.", "What news?", "Who comes here?", "Good morrow.", "Go to."]


def main() -> None:
    """Measure each policy, and print a table."""
    options = parser_of(__doc__)
    options.add_argument("--engines", type=int, default=4)
    options.add_argument("--blocks", type=int, default=192, help="Of each engine.")
    options.add_argument("--conversations", type=int, default=24)
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--policies", nargs="+", default=["cache_state", "session", "round_robin"])
    given = options.parse_args()
    print(f"{'':14}{'hit ratio':>10}{'of one pool':>13}{'imbalance':>11}{'expected - found':>18}")
    pooled = _measure(given, 1, "round_robin", given.blocks * given.engines)
    _print("one pool", pooled, pooled)
    for policy in given.policies:
        _print(policy, _measure(given, given.engines, policy, given.blocks), pooled)


@dataclass
class _Totals:
    """Tokens of all prompts, and where they were computed."""

    prompt: int = 0
    cached: int = 0
    expected: int = 0
    computed: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.cached / self.prompt

    @property
    def imbalance(self) -> float:
        return max(self.computed.values()) * len(self.computed) / sum(self.computed.values())


def _print(name: str, results: _Totals, pooled: _Totals) -> None:
    wrong = (results.expected - results.cached) / results.prompt
    print(
        f"{name:14}{results.ratio:>10.3f}{results.ratio / pooled.ratio:>13.1%}"
        f"{results.imbalance:>11.2f}{wrong:>18.3f}"
    )


def _measure(given: argparse.Namespace, num_engines: int, policy: str, blocks: int) -> _Totals:
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(num_engines)]
        for port in ports:
            arguments = ["serve", "tiny-shakespeare", "--port", str(port)]
            arguments += ["--num-blocks", str(blocks), "--block-size", "16"]
            arguments += ["--kv-events-endpoint", f"tcp://127.0.0.1:{free_port()}"]
            arguments += ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{free_port()}"]
            stack.enter_context(_process(arguments))
        router = free_port()
        arguments = ["route", "--port", str(router), "--policy", policy]
        arguments += ["--tokenizer", "tiny-shakespeare"]
        for number, port in enumerate(ports):
            arguments += ["--worker", f"http://127.0.0.1:{port},name=engine-{number}"]
        stack.enter_context(_process(arguments))
        results = _Totals(computed={f"engine-{n}": 0 for n in range(num_engines)})
        asyncio.run(_converse(given, router, results))
        return results


async def _converse(given: argparse.Namespace, port: int, results: _Totals) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        await _await_workers(session, len(results.computed))
        chance, waiting = random.Random(0), asyncio.Semaphore(4)

        async def talk(number: int) -> None:
            letters = chr(97 + number // 26) + chr(97 + number % 26)
            text = _SYSTEMS[number % len(_SYSTEMS)] + f"The house of {letters}. "
            for _ in range(given.turns):
                text += f"\nROMEO: {letters} {chance.choice(_LINES)}\nJULIET:"
                async with waiting:
                    text += await _turn(session, text, f"talk-{number}", results)

        await asyncio.gather(*(talk(number) for number in range(given.conversations)))


async def _turn(session: aiohttp.ClientSession, text: str, name: str, results: _Totals) -> str:
    body = {"model": "tiny-shakespeare", "prompt": text, "max_tokens": 24, "temperature": 0}
    headers = {"x-session-id": name}
    async with session.post("/v1/completions", json=body, headers=headers) as answer:
        told: dict[str, Any] = await answer.json()
        usage, worker = told["usage"], answer.headers["x-ostinato-worker"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        results.prompt += usage["prompt_tokens"]
        results.cached += cached
        results.expected += int(answer.headers["x-ostinato-expected-cached-tokens"])
        results.computed[worker] += usage["prompt_tokens"] - cached
        return str(told["choices"][0]["text"])


async def _await_workers(session: aiohttp.ClientSession, number: int) -> None:
    for _ in range(1500):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get("/admin/workers") as answer:
                workers = (await answer.json())["workers"]
                if sum(row["is_well"] and row["state"] == "exact" for row in workers) == number:
                    return
        await asyncio.sleep(0.2)
    raise TimeoutError("the engines did not start")


@contextlib.contextmanager
def _process(arguments: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ostinato.cli", *arguments],
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()

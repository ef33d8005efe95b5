"""Two hundred clients at once, of which many leave early: none lost, none mixed up."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers import soak_client
from tests.support.servers.servers import await_idle, serving
from tests.support.waiting import wait_until

SCENES = (
    "Enter ROMEO and JULIET above, at the window.\n\n",
    "Enter the KING, attended.\n\n",
    "Enter three WITCHES; thunder and lightning.\n\n",
)
NUM_PROMPTS = 120
NUM_CLIENTS = 200
MAX_GROWTH_BYTES = 48 * 2**20


def expectations() -> dict[str, str]:
    """Return prompts that share scenes, and how the engine alone goes on with each.

    In float64, where it cannot matter what else is in the batch (law 7).
    """
    prompts = [f"{SCENES[i % 3]}VOICE {i}:\n" for i in range(NUM_PROMPTS)]
    params = [
        SamplingParams(temperature=0, max_tokens=4 + i % 9, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    with LLM("tiny-shakespeare", dtype="float64", num_blocks=2048) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return {p: output.outputs[0].text for p, output in zip(prompts, outputs, strict=True)}


def soak(url: str, expected: dict[str, str], num_requests: int, seed: int) -> dict[str, Any]:
    """Send so many requests from a process of their own; returns what became of them."""
    arguments = [url, str(num_requests), str(NUM_CLIENTS), str(seed)]
    done = subprocess.run(
        [sys.executable, soak_client.__file__, *arguments],
        input=json.dumps(expected),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    tally: dict[str, Any] = json.loads(done.stdout)
    return tally


def resident_bytes() -> int:
    """Return how much memory this process, in which the server runs, holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def run(num_requests: int, num_warming: int) -> dict[str, Any]:
    """Warm up, soak, and assert that nothing is lost, mixed up, held or grown.

    The pool is too small for all prompts, so blocks are evicted all the time.
    """
    expected = expectations()
    llm = AsyncLLM("tiny-shakespeare", dtype="float64", num_blocks=100)
    state = ServerState(llm, ServerConfig(max_requests=NUM_CLIENTS + 50))
    with serving(state) as url:
        soak(url, expected, num_warming, seed=10**6)
        before, begun = resident_bytes(), time.perf_counter()
        tally = soak(url, expected, num_requests, seed=0)
        tally["seconds"] = round(time.perf_counter() - begun, 1)
        wait_until(lambda: state.num_live == 0)
        await_idle(llm)  # law 9, with every check()
        tally["grown_bytes"] = resident_bytes() - before
        tally["evicted_blocks"] = llm.cache_stats.evicted_blocks
    llm.shutdown()
    print(json.dumps(tally))
    assert tally["wrong"] == {}
    assert tally["answered"] + tally["broken_off"] == num_requests
    assert tally["broken_off"] > num_requests // 10
    assert tally["cached_tokens"] > 0
    assert tally["evicted_blocks"] > num_requests // 10
    assert tally["grown_bytes"] < MAX_GROWTH_BYTES
    return tally


def test_many_requests_of_two_hundred_clients():
    run(150, num_warming=20)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_twenty_thousand_requests_of_two_hundred_clients():
    run(20_000, num_warming=2_000)

"""Events as real engines published them, and what those engines then found cached.

``data`` has streams of vLLM 0.32.0 and of SGLang 0.5.23's radix cache, made at commit 4221a406 by
``benchmarks/peers/workers/events_vllm.py`` and ``events_sglang.py``: growing conversations in a
cache too small for them, with evictions and a reset. For each request they say how many batches
had been published before it, and how many of its tokens the engine found cached.
"""

from pathlib import Path

import msgspec
import pytest

from ostinato.router import Router, RouteRequest, WorkerState
from ostinato.router.policy.events import decode

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_a_real_engine_finds_cached_is_what_its_events_told(engine: str):
    recorded = msgspec.msgpack.decode((DATA / f"{engine}.msgpack").read_bytes())
    batches = [decode(number, payload) for number, payload in recorded["batches"]]
    router, heard, found = Router(), 0, 0
    router.add_worker("w", sends_events=True)
    for request in recorded["requests"]:
        for batch in batches[heard : request["batches"]]:
            assert router.apply("w", batch) is None
        heard = request["batches"]
        asked = RouteRequest(request["prompt"], salt=request["salt"])
        [seen] = router.look_up(asked, 0.0)
        assert seen.cached_tokens == request["cached"], recorded["engine"]
        assert seen.state is WorkerState.EXACT or not heard
        found += seen.cached_tokens
    assert found > 5_000
    router.check()

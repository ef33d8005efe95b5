"""Many clients at once, each of which knows what it must be told; a process of its own.

::

    python soak_client.py URL REQUESTS CLIENTS SEED < {"prompt": "its continuation", ...}

prints, as JSON, how many requests were answered in full, how many were broken off by us, and what
was wrong with the rest.
"""

import asyncio
import json
import random
import ssl
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

SHARE_BROKEN_OFF = 0.25
PATIENCE_S = 300


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        answered: To the end, and every character as expected.
        broken_off: By us, and what had come was as expected.
        wrong: What was wrong, and how often.
    """

    answered: int = 0
    broken_off: int = 0
    cached_tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


async def client(url: str, expected: dict[str, str], numbers: Any, tally: Tally) -> None:
    """Send requests one after another until the numbers are used up."""
    # A connection of its own; certificates are of no use here and slow to load.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=context) as http:
        for seed in numbers:
            try:
                await request(http, expected, random.Random(seed), tally)
            except Exception as error:
                tally.wrong[f"{type(error).__name__}: {error}"[:120]] += 1


async def request(
    http: httpx.AsyncClient, expected: dict[str, str], chance: random.Random, tally: Tally
) -> None:
    """Stream one answer, or the beginning of one."""
    prompt = chance.choice(list(expected))
    most_chunks = chance.randrange(1, 5) if chance.random() < SHARE_BROKEN_OFF else None
    echo = chance.random() < 0.25
    call = {
        "model": "tiny-shakespeare",
        "prompt": prompt,
        "max_tokens": len(expected[prompt]),
        "temperature": 0,
        "ignore_eos": True,
        "echo": echo,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    whole = (prompt if echo else "") + expected[prompt]
    text, num_chunks, reason, done = "", 0, None, False
    async with http.stream("POST", "/v1/completions", json=call) as response:
        assert response.status_code == 200, f"status {response.status_code}"
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                done = done or line == "data: [DONE]"
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk["error"]
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"]
            if chunk["usage"] is not None:
                tally.cached_tokens += chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            num_chunks += 1
            if num_chunks == most_chunks:
                break
    assert whole.startswith(text), "another text"
    if most_chunks is not None and not done:
        tally.broken_off += 1
        return
    assert done and reason == "length" and text == whole, "lost"
    tally.answered += 1


async def main(url: str, num_requests: int, num_clients: int, seed: int) -> Tally:
    """Run all clients."""
    expected: dict[str, str] = json.load(sys.stdin)
    tally, numbers = Tally(), iter(range(seed, seed + num_requests))
    await asyncio.gather(*(client(url, expected, numbers, tally) for _ in range(num_clients)))
    return tally


if __name__ == "__main__":
    _, address, *settings = sys.argv
    print(json.dumps(asdict(asyncio.run(main(address, *map(int, settings))))))

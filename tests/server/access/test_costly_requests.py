"""A request costs others no more than its sender: processor time is counted, not wall time.

What a body costs is compared with what reading it as JSON costs: a ratio that no processor changes.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ostinato.server.app import create_app
from ostinato.server.state import ServerState

MAX_RATIO = 12
"""A body is looked at a few times: by count, by the parser and by validation."""

FLOOR_S = 0.05
"""What any request costs, small as it may be."""

MANY = 50_000
"""As many values as are looked at."""

MODEL = "tiny-shakespeare"
QUESTION = [{"role": "user", "content": "Who's there?"}]

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "Who's there?"},
    "/v1/chat/completions": {"model": MODEL, "messages": QUESTION},
    "/v1/responses": {"model": MODEL, "input": QUESTION},
    "/v1/messages": {"model": MODEL, "messages": QUESTION, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": QUESTION},
    "/tokenize": {"prompt": "Who's there?"},
    "/detokenize": {"tokens": [1]},
    "/admin/prewarm": {"prompt": "Who's there?"},
    "/ui/play": {"prompt": "Who's there?"},
}


LISTS: dict[str, Any] = {
    "nulls": None,
    "numbers": 1,
    "empty objects": {},
    "empty lists": [],
    "messages without a role": {"content": "x"},
}
"""What the list that a route takes is filled with."""

FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "unknown fields": lambda: {f"x{i}": 1 for i in range(MANY)},
    "biases": lambda: {"logit_bias": {str(i): "x" for i in range(MANY)}},
    "stop strings": lambda: {"stop": ["x"] * MANY},
    "stop ids": lambda: {"stop_token_ids": [None] * MANY},
    "tools": lambda: {"tools": [{"type": "function"}] * MANY},
    "depth": lambda: {"user": [_nested(900)] * 100},
    "a long number": lambda: {"seed": 10**4000},
}
"""What is added to a good body."""


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("attack", LISTS)
def test_a_list_costs_no_more_than_reading_it(state: ServerState, path: str, attack: str):
    """It is refused by its first wrong item or its length, or is as good as it is long."""
    good = ROUTES[path]
    field = next(name for name in ("messages", "input", "tokens", "prompt") if name in good)
    _assert_cheap(state, path, {**good, field: [LISTS[attack]] * MANY})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("attack", FIELDS)
def test_a_field_costs_no_more_than_reading_it(state: ServerState, path: str, attack: str):
    """It is refused, known or not."""
    _assert_cheap(state, path, {**ROUTES[path], **FIELDS[attack]()})


PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 400_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * MANY}]}),
    ],
)
def test_more_values_than_a_prompt_needs_are_not_even_parsed(
    state: ServerState, path: str, body: dict[str, Any]
):
    _assert_cheap(state, path, {"model": MODEL, **body}, most_ratio=2)


def _assert_cheap(
    state: ServerState, path: str, body: dict[str, Any], most_ratio: float = MAX_RATIO
) -> None:
    """Assert that a body costs a small multiple of reading it; most are refused."""
    data = json.dumps(body).encode()
    unit_s = min(_cpu_s(lambda: json.loads(data)) for _ in range(3))
    status, cost_s = asyncio.run(_send(state, path, data))
    assert status < 500
    assert cost_s < most_ratio * unit_s + FLOOR_S, f"{cost_s / unit_s:.1f} times reading it"


async def _send(state: ServerState, path: str, data: bytes) -> tuple[int, float]:
    """Return an answer's status, and the processor time that all of this process took for it."""
    transport = httpx.ASGITransport(create_app(state))
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.post(path, content=b"{}", headers=headers)  # imports what it needs, once
        with _no_collecting():
            start_s = time.process_time()
            answer = await client.post(path, content=data, headers=headers)
            return answer.status_code, time.process_time() - start_s


def _cpu_s(work: Callable[[], object]) -> float:
    with _no_collecting():
        start_s = time.process_time()
        work()
        return time.process_time() - start_s


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Leave garbage alone: a search visits what all other tests have made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

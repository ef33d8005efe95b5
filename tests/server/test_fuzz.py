"""Schemathesis sends whatever the description of the server allows, and what it does not."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.keyed import keyed_server
from tests.support.servers.servers import await_idle_server, serving

MODEL = "tiny-shakespeare"
CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    response_schema_conformance,
    content_type_conformance,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    """Serve a model whose longest answer is short, so that a lucky request takes no minute."""
    llm = AsyncLLM(MODEL, num_blocks=64, max_model_len=48)
    yield ServerState(llm, ServerConfig(max_n=3, max_requests=16))
    llm.shutdown()


def fuzz(state: ServerState, max_examples: int) -> Counter[int]:
    """Send so many requests of each kind to each route; returns how often each status came.

    Raises:
        AssertionError: One was answered with 500 or above, or as the description does not say, or
            left something running (law 9).
    """
    statuses: Counter[int] = Counter()
    with serving(state) as url:
        description = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in description.get_all_operations():
            operation = found.ok()
            for mode in MODES if _can_be_wrong(operation) else MODES[:1]:
                _fuzz(operation, mode, max_examples, statuses)
        await_idle_server(state)
    return statuses


def _can_be_wrong(operation: Any) -> bool:
    """Whether a request may differ from its description: names in a path may be any text."""
    types = {p.definition["schema"].get("type") for p in operation.iter_parameters()}
    return bool(operation.body or types - {"string"})


def _fuzz(operation: Any, mode: GenerationMode, max_examples: int, statuses: Counter[int]) -> None:
    """Send requests of one kind to one route."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and len(str(body.get("model"))) % 4:
            case.body = {**body, "model": MODEL}  # more often than chance would have it
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()


def test_nothing_that_is_sent_is_a_mistake_of_the_server(state: ServerState):
    statuses = fuzz(state, max_examples=1)

    assert statuses[200] > 0 and statuses[400] > 0


def test_a_caller_without_permission_gets_an_answer_that_is_described(tmp_path: Path):
    """Without a key, and with a tenant's: each status is listed, and security says who may."""
    with keyed_server(tmp_path) as server:
        description = server.ask("ops", "/openapi.json", method="GET").json()
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                url = f"{server.url}{path}".replace("{", "").replace("}", "")
                for headers in ({}, {"Authorization": f"Bearer {server.keys['ann']}"}):
                    answer = httpx.request(method, url, headers=headers, json={})
                    assert str(answer.status_code) in operation["responses"], (method, path)
                    if operation["security"] and not headers:
                        assert answer.status_code == 401
        assert set(description["components"]["securitySchemes"]) == {"bearer", "x-api-key"}


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_nothing_that_is_sent_in_a_night_is_a_mistake_of_the_server(state: ServerState):
    statuses = fuzz(state, max_examples=500)

    assert statuses[200] > 100 and statuses[400] > 100

"""Prompts are tokenized within a limit of length, and by turns."""

import asyncio
import threading
from array import array
from typing import Any
from unittest import mock

import pytest

from ostinato.router.process.incremental_tokenizer import Beginning
from ostinato.router.process.routing_fields import RoutingFields
from ostinato.router.process.tokenizer import LocalTokenizer
from ostinato.router.process.tokens import RoutingTokenizer
from tests.router.stub_workers import names, routed

MODEL = "tiny-shakespeare"


@pytest.mark.parametrize("tokenizer", [None, MODEL])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 1001}),
        ("/v1/completions", {"prompt": [1] * 1001}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1001}]}),
        ("/v1/chat/completions", {"messages": [{}] * 100}),
        ("/v1/messages", {"messages": [], "tools": [{"name": "x" * 1001}]}),
    ],
    ids=["text", "ids", "chat", "turns", "tools"],
)
async def test_a_prompt_that_is_too_long_is_refused_by_name_and_costs_no_worker(
    path: str, body: Any, tokenizer: str | None
):
    [worker] = names("a")
    limits = {"max_prompt_characters": 1000, "tokenizer": tokenizer}
    async with routed(worker, **limits) as router:
        status, answer = await router.post(body, path)
        assert status == 400 and "--max-prompt-characters" in answer["error"]["message"]
        assert worker.bodies == [] and router.app.fleet.router.workers()[0].assigned == 0


async def test_a_short_prompt_does_not_wait_for_long_ones():
    """Not for those of other tenants, and not for those of its own."""
    tokenizer, gate = LocalTokenizer(MODEL), threading.Event()
    finish = tokenizer.finish

    def finish_slowly(beginning: Beginning) -> "array[int]":
        if beginning.num_left >= 100_000:
            assert gate.wait(30)
        return finish(beginning)

    tokens = RoutingTokenizer({}, tokenizer)

    async def count(text: str, tenant: str) -> int:
        prompt = RoutingFields.of("/v1/completions", b'{"prompt":"%s"}' % text.encode())
        return (await tokens.request(prompt, "", tenant, "", {})).num_tokens

    with mock.patch.object(tokenizer, "finish", finish_slowly):
        long = [asyncio.create_task(count("to be " * 20_000, "ann")) for _ in range(4)]
        assert await count("Ay me!", "bob") == await count("Ay me!", "ann") > 0
        assert not any(task.done() for task in long)
        gate.set()
        assert len(set(await asyncio.gather(*long))) == 1

"""Two engines of ours behind a router, and the clients that people have."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.served_process import Served, served
from tests.support.servers.servers import serving
from tests.support.waiting import wait_until

MODEL = "tiny-shakespeare"
SCENE = "Enter ROMEO and JULIET above, at the window.\n\nJULIET:\nWilt thou be gone?\n"


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, str]]:
    """Serve two engines that publish their events."""
    with ExitStack() as stack:
        urls = {}
        for name in ("east", "west"):
            llm = AsyncLLM(
                MODEL,
                dtype="float32",
                num_blocks=256,
                block_size=8,
                kv_events_endpoint="tcp://127.0.0.1:0",
                kv_events_replay_endpoint="tcp://127.0.0.1:0",
            )
            stack.callback(llm.shutdown)
            config = ServerConfig(model_names=(MODEL,))
            urls[name] = stack.enter_context(serving(ServerState(llm, config)))
        yield urls


def routing(engines: dict[str, str], *options: str) -> AbstractContextManager[Served]:
    """Run a router before engines."""
    workers = [f"--worker={url},name={name}" for name, url in engines.items()]
    return served(*workers, *options, command="route")


@pytest.fixture(scope="module")
def router(engines: dict[str, str]) -> Iterator[Served]:
    with routing(engines, "--tokenizer", MODEL) as process:
        yield process


def complete(router: Served, prompt: str, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def expected(answer: httpx.Response) -> int:
    return int(answer.headers["x-ostinato-expected-cached-tokens"])


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def row_of(router: Served, name: str) -> dict[str, Any]:
    """Return what is known of a worker."""
    rows = httpx.get(f"{router.url}/admin/workers").json()["workers"]
    return next(row for row in rows if row["name"] == name)


def await_exact(router: Served, name: str, at_least: int = 0) -> None:
    def is_exact() -> bool:
        row = row_of(router, name)
        return row["state"] == "exact" and row["cached_tokens"] >= at_least

    wait_until(is_exact)


def test_a_prompt_goes_where_its_prefix_is_and_what_was_expected_is_found(router: Served):
    """By events: whole blocks, as the worker counts them, to the last one."""
    first = complete(router, SCENE)
    worker = first.headers["x-ostinato-worker"]
    await_exact(router, worker, at_least=len(SCENE) // 8 * 8)
    again = complete(router, SCENE + "It is not yet near day.")

    assert again.headers["x-ostinato-worker"] == worker
    assert again.headers["x-ostinato-worker-state"] == "exact"
    assert expected(again) == len(SCENE) // 8 * 8 <= cached(again)


def test_another_salt_is_another_prefix_for_the_router_as_well(router: Served):
    worker = complete(router, SCENE, cache_salt="ann").headers["x-ostinato-worker"]
    await_exact(router, worker)
    mine = complete(router, SCENE, cache_salt="ann")
    other = complete(router, SCENE, cache_salt="bob")
    assert mine.headers["x-ostinato-worker"] == worker
    assert (expected(mine) >= 64, expected(other)) == (True, 0)


def test_a_router_that_joins_late_learns_by_snapshot_what_is_cached(
    engines: dict[str, str], router: Served
):
    """And asks the workers for tokens, since it was given no tokenizer."""
    scene = "Exeunt all but the Prince. " * 3
    worker = complete(router, scene).headers["x-ostinato-worker"]
    await_exact(router, worker, at_least=len(scene) // 8 * 8)
    with routing(engines) as late:
        await_exact(late, worker, at_least=len(scene) // 8 * 8)
        answer = complete(late, scene + "Whither?")
        assert answer.headers["x-ostinato-worker"] == worker
        assert expected(answer) >= len(scene) // 8 * 8
        assert row_of(late, worker)["num_snapshots"] == 1


def test_openai_and_anthropic_clients_do_not_notice_the_router(router: Served):
    """Chats, streams, stored responses that are continued, and messages."""
    line = [{"role": "user", "content": "Wilt thou come with me to Verona?"}]
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        play = {"model": MODEL, "temperature": 0}
        whole = client.chat.completions.create(messages=line, max_tokens=8, **play)
        stream = client.chat.completions.create(messages=line, max_tokens=8, stream=True, **play)
        pieces = [part.choices[0].delta.content or "" for part in stream if part.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        first = client.responses.create(input="Ay me!", max_output_tokens=16, **play)
        for _ in range(3):  # only the worker that stored it knows it
            more = {"previous_response_id": first.id, "max_output_tokens": 16}
            assert client.responses.create(input="Go on.", **more, **play).output_text
        assert client.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(prompt="x", **play, extra_body={"suffix": "y"})
    with anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0) as claude:
        said = claude.messages.create(model=MODEL, max_tokens=8, messages=line)
        assert said.content[0].text
        with claude.messages.stream(model=MODEL, max_tokens=8, messages=line) as events:
            assert events.get_final_text()
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(model="hamlet", max_tokens=8, messages=line)

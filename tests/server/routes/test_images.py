"""Official clients send images."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.models.images import image_checkpoint, picture, png
from tests.support.servers.servers import await_idle, serving
from tests.support.waiting import wait_until

__all__ = ["checkpoints"]

BASE64 = base64.b64encode(png(picture(1))).decode()
URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(scope="module")
def viewer(checkpoints: Checkpoints) -> Iterator[str]:
    """Serve a tiny model that takes images; after the tests nothing is left running (law 9)."""
    path = image_checkpoint(checkpoints, "llava")
    llm = AsyncLLM(
        path,
        dtype="float32",
        num_blocks=128,
        limit_mm_per_prompt={"image": 2},
        max_image_pixels=9000,
        max_prompt_pixels=12_000,
    )
    with serving(ServerState(llm, ServerConfig(model_names=("viewer",)))) as url:
        yield url
        wait_until(lambda: not llm.engine.has_work)
        asyncio.run(llm.reset_prefix_cache())  # breakpoints are leases
    await_idle(llm)
    llm.shutdown()


def ask(url: str, *images: str, text: str = "What is it?") -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(model="viewer", messages=messages, max_tokens=2)


def test_openais_client_sends_images_and_later_questions_hit_them(viewer: str):
    first, second = ask(viewer, URL, URL), ask(viewer, URL, URL, text="Whose is it?")

    assert first.usage.prompt_tokens > 32
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_anthropics_client_sends_images_and_keeps_them_by_breakpoints(viewer: str):
    source: Any = {"type": "base64", "media_type": "image/png", "data": BASE64}
    image: Any = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": "Whose?"}]}]
    with anthropic.Anthropic(base_url=viewer, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model="viewer", messages=messages)
        answer = client.messages.create(model="viewer", messages=messages, max_tokens=2)

    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached > 16
    assert cached >= 16


def test_a_conversation_with_an_image_is_embedded_and_its_beams_are_searched(viewer: str):
    """In vLLM's shape: messages in place of input; the chat's prompt is a hit of the second."""
    image: Any = {"type": "image_url", "image_url": {"url": URL}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "How many boats?"}]}]
    body = {"model": "viewer", "messages": messages}

    first, second = (httpx.post(f"{viewer}/v1/embeddings", json=body).json() for _ in range(2))
    beams = {**body, "use_beam_search": True, "n": 2, "max_tokens": 3}
    searched = httpx.post(f"{viewer}/v1/chat/completions", json=beams).json()
    refused = httpx.post(f"{viewer}/v1/embeddings", json={**body, "truncate_prompt_tokens": 4})

    assert first["data"] == second["data"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 > 16
    assert len({choice["message"]["content"] for choice in searched["choices"]}) == 2
    assert searched["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert refused.status_code == 400
    assert "images is not cut" in refused.json()["error"]["message"]


def test_responses_take_images_and_continue_them(viewer: str):
    """The second question names the first response; the image in it hits."""
    image: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
    text: Any = {"type": "input_text", "text": "What is it?"}
    first: Any = [{"role": "user", "content": [image, text]}]
    with openai.OpenAI(base_url=f"{viewer}/v1", api_key="none", max_retries=0) as client:
        settings: Any = {"model": "viewer", "max_output_tokens": 2}
        seen = client.responses.create(input=first, **settings)
        asked = client.responses.create(
            input="Whose is it?", previous_response_id=seen.id, **settings
        )

    assert seen.usage is not None and asked.usage is not None
    assert asked.usage.input_tokens_details.cached_tokens >= 16 < seen.usage.input_tokens


def test_chats_take_images_in_the_results_of_tools(viewer: str):
    call = {"id": "call_1", "type": "function", "function": {"name": "snap", "arguments": "{}"}}
    result = [
        {"type": "text", "text": "Taken:"},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    messages: Any = [
        {"role": "user", "content": "Take a picture."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    with openai.OpenAI(base_url=f"{viewer}/v1", api_key="none", max_retries=0) as client:
        seen, again = (
            client.chat.completions.create(model="viewer", messages=messages, max_tokens=2)
            for _ in range(2)
        )

    assert again.usage.prompt_tokens_details.cached_tokens == seen.usage.prompt_tokens - 1


def test_messages_take_images_in_the_results_of_tools(viewer: str):
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "is_error": True,
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "Blurred."}],
    }
    messages: Any = [
        {"role": "user", "content": "Take a picture."},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "toolu_1", "name": "snap", "input": {}}]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    tools: Any = [{"name": "snap", "input_schema": {"type": "object"}}]
    with anthropic.Anthropic(base_url=viewer, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model="viewer", messages=messages, tools=tools)
        del messages[2]["content"][0]["content"][0]
        without = client.messages.count_tokens(model="viewer", messages=messages, tools=tools)

    assert counted.input_tokens == without.input_tokens + 16


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (["data:image/png;base64,AAAA"], "image 1 cannot be decoded"),
        ([URL, "data:image/png;base64," + base64.b64encode(png(picture(1, 99, 99))).decode()],
         "image 2 has 99 x 99"),
        ([URL] * 3, "'image': 2"),
        (["http://169.254.169.254/latest"], "--allowed-media-domains"),
        (["file:///etc/hosts"], "--allowed-local-media-path"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_had_are_refused_and_nothing_else_suffers(images, said, viewer: str):
    with pytest.raises(openai.BadRequestError, match=said):
        ask(viewer, *images)
    assert ask(viewer, URL).usage.completion_tokens


def test_a_text_model_refuses_images(http: httpx.Client):
    part = {"type": "image_url", "image_url": {"url": URL}}
    body = {"model": "bard", "messages": [{"role": "user", "content": [part]}]}

    answer = http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400 and "serves text alone" in answer.text


def test_the_page_and_tokenize_show_an_image_as_one(viewer: str):
    ask(viewer, URL)
    part = {"type": "image_url", "image_url": {"url": URL}}
    body = {"model": "viewer", "messages": [{"role": "user", "content": [part]}]}
    with httpx.Client(base_url=viewer, timeout=60) as client:
        prefixes = client.get("/ui/state").json()["prefixes"]
        counted = client.post("/tokenize", json=body).json()

    assert any("[image: 16 tokens]" in prefix["head"] + prefix["branch"] for prefix in prefixes)
    assert counted["count"] > 16


def test_the_pixels_of_a_conversation_are_bounded_before_any_is_decoded(viewer: str):
    """Two images of 6,400 pixels, of which the second is broken: neither is decoded."""
    file = png(picture(1, 80, 80))
    whole, broken = (base64.b64encode(part).decode() for part in (file, file[: len(file) // 2]))
    with pytest.raises(openai.BadRequestError, match="max_prompt_pixels=12000"):
        ask(viewer, *(f"data:image/png;base64,{part}" for part in (whole, broken)))

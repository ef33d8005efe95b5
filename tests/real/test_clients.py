"""The official clients against a server with a real model: tools, streams, what was cached."""

import json
from typing import Any

import anthropic
import openai
import pytest

from ostinato.server.state import ServerState
from tests.support.models.real_model import SYSTEM
from tests.support.servers.servers import serving

pytestmark = pytest.mark.real


def test_a_required_tool_is_called_with_its_arguments(client: openai.OpenAI):
    tool: Any = {
        "type": "function",
        "function": {
            "name": "freeze_date",
            "description": "When a river freezes.",
            "parameters": {
                "type": "object",
                "properties": {"river": {"enum": ["Ostra", "Mern"]}},
                "required": ["river"],
                "additionalProperties": False,
            },
        },
    }

    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "When does the Ostra freeze?"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )

    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function" and call.function.name == "freeze_date"
    assert json.loads(call.function.arguments)["river"] in ("Ostra", "Mern")


def test_text_of_several_bytes_per_character_streams_whole(client: openai.OpenAI):
    """A musical clef is four bytes, and several tokens; no piece ends within it."""
    text = "Grüße aus Köln, 音楽 𝄞 🎼"

    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Greet me."}],
        stream=True,
        temperature=0,
        max_tokens=80,
        extra_body={"structured_outputs": {"choice": [text]}, "drafts": "off"},
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

    assert "".join(pieces) == text and len(pieces) > 8
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_client_sees_what_was_cached(client: openai.OpenAI):
    messages: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Is the water warm?"},
    ]

    answer = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=16
    )
    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And why?"},
    ]
    second = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=8
    )

    assert answer.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert details.cached_tokens >= answer.usage.prompt_tokens


def test_anthropic_s_client_streams_and_sees_what_was_cached(state: ServerState):
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    with serving(state) as url, anthropic.Anthropic(base_url=url, api_key="none") as client:
        seen = []
        for question in ("Where is the port?", "Where are the hills?"):
            with client.messages.stream(
                model="smollm2",
                system=system,
                messages=[{"role": "user", "content": question}],
                max_tokens=8,
            ) as stream:
                text = "".join(stream.text_stream)
                message = stream.get_final_message()
            assert text == "".join(part.text for part in message.content if part.type == "text")
            seen.append(message.usage)

    assert seen[1].cache_read_input_tokens > 50

"""Reasoning is separated from the answer through every API and its official client.

What the model says is dictated with ``structured_outputs.choice``, thoughts and all.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ostinato import AsyncLLM
from ostinato.core.errors import ConfigError
from ostinato.server.answers.answer_formats import TOOL_FORMATS, AnswerFormats
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.formats.conftest import CITIES, says
from tests.support.models.checkpoints import make_tokenizer
from tests.support.servers.servers import serving

SAID = "<think>Rain, I fear.</think>\n\nIt rains."
ASK: Any = [{"role": "user", "content": "How is the weather?"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
ANSWER: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITIES}}


def served(llm: AsyncLLM, **settings: Any) -> Any:
    return serving(ServerState(llm, ServerConfig(model_names=("scribe",), **settings)))


@pytest.fixture(scope="module")
def thinker(scribe: tuple[str, ServerState]) -> Iterator[str]:
    """Serve a model whose template says nothing of thoughts; it may begin with them."""
    with served(scribe[1].llm, reasoning_parser="qwen3") as url:
        yield url


def chat(url: str, **settings: Any) -> Any:
    """Ask for a chat completion, or a stream of it."""
    settings = {"messages": ASK, "max_tokens": 200, "temperature": 0, **settings}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="scribe", **settings)
        return list(answer) if settings.get("stream") else answer


def test_thoughts_have_a_field_of_their_own(thinker: str):
    answer = chat(thinker, extra_body=says(SAID))
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Rain, I fear.", "It rains.")
    num = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < num < answer.usage.completion_tokens
    silent = chat(thinker, extra_body={**says(SAID), "include_reasoning": False})
    assert not hasattr(silent.choices[0].message, "reasoning")
    assert silent.choices[0].message.content == "It rains."


def test_thoughts_are_streamed(thinker: str):
    chunks = chat(thinker, extra_body=says(SAID), stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "Rain, I fear."
    assert "".join(d.content or "" for d in deltas) == "It rains."


def test_a_response_has_an_item_of_them(thinker: str):
    """Whole and through the official helper; by name they go back into the conversation."""
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as client:
        settings: Any = {"model": "scribe", "input": "Well?", "extra_body": says(SAID)}
        whole = client.responses.create(**settings, include=["reasoning.encrypted_content"])
        with client.responses.stream(**settings) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        for response in (whole, final):
            thought, message = response.output
            assert thought.type == "reasoning" and thought.content[0].text == "Rain, I fear."
            assert message.content[0].text == response.output_text == "It rains."
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        back = [item.to_dict() for item in whole.output]
        said: Any = [{"role": "user", "content": "Well?"}, *back, *ASK]
        again = client.responses.create(model="scribe", input=said, max_output_tokens=2)
        assert again.status == "incomplete"


def test_a_message_has_a_block_of_them(thinker: str):
    """It goes back in the history; ``omitted`` shows that there was one, and no more."""
    with anthropic.Anthropic(base_url=thinker, api_key="none", max_retries=0) as claude:
        settings: Any = {"model": "scribe", "messages": ASK, "max_tokens": 1500,
                         "thinking": {"type": "enabled", "budget_tokens": 1024},
                         "extra_body": says(SAID)}  # fmt: skip
        whole = claude.messages.create(**settings)
        with claude.messages.stream(**settings) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            thought, text = message.content
            assert (thought.type, thought.thinking) == ("thinking", "Rain, I fear.")
            assert text.text == "It rains."
        settings["messages"] = [*ASK, {"role": "assistant", "content": whole.content}, *ASK]
        settings["thinking"] = {"type": "adaptive", "display": "omitted"}
        [thought, text] = claude.messages.create(**settings).content
        assert thought.thinking == "" and text.text == "It rains."


def test_a_form_begins_after_the_thoughts_that_the_template_began(marked: AsyncLLM):
    """Thinking ends at once here: its mark is far the likeliest token while it may come."""
    [close] = asyncio.run(marked.encode("</think>"))
    with served(marked, reasoning_parser="deepseek_r1") as url:
        asked = {"response_format": ANSWER, "logit_bias": {str(close): 100}}
        answer = chat(url, **asked)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Paris")
        thinking = chat(url, response_format=ANSWER, max_tokens=4, logit_bias={str(close): -100})
        assert thinking.choices[0].message.content == ""
        assert thinking.usage.completion_tokens_details.reasoning_tokens == 4
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = chat(url, response_format=ANSWER, extra_body=off)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Paris")
        history = [*ASK, {"role": "assistant", "content": "It rains.", "reasoning": "Hm."}, *ASK]
        assert chat(url, messages=history, max_tokens=1).usage.prompt_tokens > 1


@pytest.mark.parametrize("fmt", TOOL_FORMATS)
def test_a_call_is_made_in_the_format_of_the_family(marked: AsyncLLM, fmt: str):
    """By a model that knows nothing: the grammar writes the marks, and the parser reads them."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with served(marked, tool_call_parser=fmt) as url:
        [several] = chat(url, tools=[WEATHER], tool_choice="required").choices
        assert several.finish_reason == "length" or not several.message.content
        asked = {"tools": [WEATHER], "parallel_tool_calls": False, "tool_choice": named}
        [one] = chat(url, **asked).choices
        assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
        for call in [*several.message.tool_calls, *one.message.tool_calls]:
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Oslo", "Paris")
        calls = [call for chunk in chat(url, **asked, stream=True)
                 for call in chunk.choices[0].delta.tool_calls or ()]  # fmt: skip
        written = "".join(call.function.arguments for call in calls)
        assert json.loads(written)["city"] in ("Oslo", "Paris")
        [free] = chat(url, tools=[strict], max_tokens=8).choices  # its grammar compiles
        assert free.finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ tools }}<|channel|>", "<|call|>"),
        ("{{ tools }}[TOOL_CALLS]", ""),
        ("{{ tools }}<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("{{ tools }}<tool_call>", "</tool_call>"),
        ("{{ tools }}<tool_call><function=", "</tool_call>"),
    ],
)
def test_the_chat_template_shows_the_format(template: str, found: str):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    formats = AnswerFormats.of(tokenizer)
    assert formats.tools.closes == found
    assert formats.is_native == ("<function=" not in template)


def test_formats_that_do_not_fit_are_refused(scribe: tuple[str, ServerState]):
    with pytest.raises(ConfigError, match="shows no tools"):
        ServerState(scribe[1].llm, ServerConfig(tool_call_parser="mistral"))
    for wrong in ({"tool_call_parser": "x"}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError, match="must be one of"):
            ServerConfig(**wrong)


ALONE = "the model serves text alone"


@pytest.mark.parametrize(
    ("path", "part", "reason"),
    [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "data:,"}}, ALONE),
        ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": ""}}, "audio"),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "x"}}, ALONE),
        ("/v1/responses", {"type": "input_file", "file_id": "x"}, "file"),
    ],
)
def test_parts_that_are_no_text_are_refused_with_a_way_out(thinker: str, path, part, reason):
    message = {"role": "user", "content": [part]}
    body = {"model": "scribe", "max_tokens": 1, "messages": [message]}
    if path == "/v1/responses":
        body = {"model": "scribe", "input": [message]}
    answer = httpx.post(f"{thinker}{path}", json=body)
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and reason in said
    assert re.search(r"leave (the part|them) out", said)
    assert reason == ALONE or f".content[0]: a part of type '{part['type']}'" in said

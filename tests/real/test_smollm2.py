"""A real model answers as ``generate`` does, and every turn hits all that came before it."""

import json

import pytest
import torch
from transformers import PreTrainedModel

from ostinato import RequestOutput
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.server.state import ServerState
from tests.support.models.real_model import NUM_NEW, answers, prompt_ids

pytestmark = pytest.mark.real

NEAR_TIE = 1e-3
"""Two logits this close may change places by rounding; the next is a thousand times further."""
QUESTIONS = (
    "Where does the river rise?",
    "What do the barges carry?",
    "Name the port.",
    "What happens in winter?",
    "How long is the river?",
    "Where do the barges wait?",
)
CONTINUED = (
    ("Name the port.", "Vell.", "And the hills?"),
    ("Name the port.", "Vell, in the north.", "And the hills?"),
)
STRANGERS = (
    "Once upon a time",
    "def fibonacci(n):\n",
    "The capital of France is",
    "2, 4, 6, 8,",
    "La ville de Paris est",
    "<html><body>",
)


def assert_as_generated(found: list[RequestOutput], reference: PreTrainedModel) -> None:
    """Compare with ``generate``, up to where its own two best tokens are a tie."""
    prompts = [list(output.prompt_token_ids) for output in found]
    longest = max(map(len, prompts))
    expected = reference.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, output in enumerate(found):
        tokens = zip(output.outputs[0].token_ids, expected.sequences[row, longest:], strict=False)
        for step, (ours, theirs) in enumerate(tokens):
            best, second = expected.logits[step][row].topk(2).values.tolist()
            if ours != theirs:
                assert best - second < NEAR_TIE, f"row {row}, token {step}: {ours}, not {theirs}"
                break


def test_answers_are_those_of_generate_cold_in_chunks_among_strangers_and_with_hits(
    state: ServerState, reference: PreTrainedModel
):
    """Eight prompts on one note, of which two go on, beside six strangers; then all again."""
    tokenizer = state.llm.engine.loaded.require_tokenizer()
    asked = [*((question,) for question in QUESTIONS), *CONTINUED]
    on_the_note = [prompt_ids(state, *turns) for turns in asked]
    strangers = [list(tokenizer(text)["input_ids"]) for text in STRANGERS]
    assert len(on_the_note) + len(strangers) == 14

    cold = answers(state, on_the_note + strangers)
    warm = answers(state, on_the_note + strangers)

    assert sum(output.num_cached_tokens for output in cold) > 5 * len(on_the_note[0]) / 2
    for group in (cold[: len(on_the_note)], cold[len(on_the_note) :]):
        assert_as_generated(group, reference)
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
        (output,) = answers(state, [prompt], max_tokens=20)
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

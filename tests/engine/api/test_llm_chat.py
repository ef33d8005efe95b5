"""``LLM.chat``: turns in the words of the model's template."""

from typing import Any

import pytest

from ostinato import LLM
from ostinato.core.errors import RequestError
from tests.engine.api.llm_calls import GREEDY, tokens_of


def conversation(*contents: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_a_conversation_is_written_by_the_template_and_the_next_turn_finds_it(bard: LLM):
    question = conversation("What news?")
    first = bard.chat(question, GREEDY, use_tqdm=False)[0]
    tokenizer = bard.get_tokenizer()
    rendered = tokenizer.apply_chat_template(question, tokenize=True, add_generation_prompt=True)
    assert first.prompt_token_ids == list(rendered["input_ids"])

    more = [*question, {"role": "assistant", "content": first.outputs[0].text}, *question]
    second = bard.chat(more, GREEDY, use_tqdm=False)[0]

    assert second.num_cached_tokens >= len(first.prompt_token_ids)


def test_several_conversations_are_a_batch(bard: LLM):
    talks = [conversation("What news?"), conversation("Who is there?")]

    outputs = bard.chat(talks, GREEDY, use_tqdm=False)

    alone = [bard.chat(talk, GREEDY, use_tqdm=False)[0] for talk in talks]
    assert tokens_of(outputs) == tokens_of(alone)


def test_a_template_may_be_given(llm: LLM):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    output = llm.chat(conversation("To be"), GREEDY, chat_template=template, use_tqdm=False)[0]

    assert output.prompt_token_ids == llm.get_tokenizer()("To be")["input_ids"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "must be a list of messages, not NoneType"),
        ("hi", "must be a list of messages, not str"),
        ({"role": "user", "content": "hi"}, "must be a list of messages, not dict"),
        (["hi"], "must be a list of messages, not str"),
        ([5], "message 0 is 5: it needs a 'role' and a 'content'"),
        ([{}], "message 0 is {}: it needs"),
        ([{"role": "user"}], "message 0 is {'role': 'user'}"),
        ([[]], "messages is empty"),
        ([{"role": "user", "content": "hi"}], "has no chat template: give chat_template"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str, llm: LLM):
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}"])
def test_a_template_that_refuses_is_quoted(template: str, llm: LLM):
    with pytest.raises(RequestError, match="the chat template refuses these messages: "):
        llm.chat(conversation("hi"), GREEDY, chat_template=template, use_tqdm=False)

"""What a model generated comes back as the tokens that it generated.

Random models speak in tokens that no tokenizer would choose, so that nearly every answer drifts.
"""

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, RequestOutput, SamplingParams
from ostinato.engine.requests.prompts import Prompt
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.conversations import WORDS, num_shown, talking_checkpoint


@pytest.fixture(scope="module")
def path(checkpoints: Checkpoints) -> Path:
    return talking_checkpoint(checkpoints)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), num_blocks=512)


def sampled(turn: int, **changes: Any) -> SamplingParams:
    """Speak at temperature 1, in other words each time."""
    return SamplingParams(
        **{"max_tokens": 12, "seed": turn, "allowed_token_ids": list(WORDS), **changes}
    )


Ask = Callable[[list[dict[str, str]], SamplingParams], RequestOutput]


def num_missed(ask: Ask, num_turns: int = 20, **changes: Any) -> int:
    """Hold a conversation, and count tokens of earlier turns that missed, but the last (law 4)."""
    messages: list[dict[str, str]] = []
    known, num_missed = 0, 0
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"What about {turn}?"})
        output = ask(messages, sampled(turn, **changes))
        num_missed += max(0, known - 1 - output.num_cached_tokens)
        answer = output.outputs[0]
        messages.append({"role": "assistant", "content": answer.text})
        known = len(output.prompt_token_ids) + num_shown(answer.text, answer.token_ids)
    return num_missed


def offline(llm: LLM, **settings: Any) -> Ask:
    return lambda messages, params: llm.chat(messages, params, use_tqdm=False, **settings)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},  # cut off by max_tokens
        {"allowed_token_ids": [1, *WORDS], "logit_bias": {1: 4.0}},  # often ended by the model
        {"stop": ["e", "th", "\n"]},
    ],
    ids=["cut", "ended", "stopped"],
)
def test_every_turn_hits_all_tokens_of_those_before_it(llm: LLM, changes: dict[str, Any]):
    """Twenty turns at temperature 1: the next turn goes on where the answer ended."""
    assert num_missed(offline(llm), **changes) == 0


def test_without_kept_tokens_the_same_conversation_misses_most_of_it(llm: LLM, path: Path):
    """So the test above can fail; as an argument of a call and as a setting."""
    assert num_missed(offline(llm, keep_tokens=False)) > 100
    assert num_missed(offline(LLM(str(path), num_blocks=512, keep_tokens=False))) > 100


def test_an_event_loop_s_conversation_hits_as_well(path: Path):
    async def talk() -> int:
        async with AsyncLLM(str(path), num_blocks=512) as llm:

            async def ask(messages: list[dict[str, str]], params: SamplingParams) -> RequestOutput:
                async for output in llm.chat(messages, params):
                    last = output
                return last

            messages, known, missed = [], 0, 0
            for turn in range(5):
                messages.append({"role": "user", "content": f"And {turn}?"})
                output = await ask(messages, sampled(turn))
                missed += max(0, known - 1 - output.num_cached_tokens)
                messages.append({"role": "assistant", "content": output.outputs[0].text})
                known = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            return missed

    assert asyncio.run(talk()) == 0


def test_of_a_long_history_only_the_new_turn_is_tokenized(llm: LLM):
    """Counted in bytes of text: 50 of 1,600."""
    history = [{"role": "user", "content": "As we said before: " * 80}]
    texts = llm.engine.texts
    assert texts is not None
    one = sampled(1, max_tokens=1)
    llm.chat(history, one, use_tqdm=False)
    before = texts.num_tokenized_bytes
    more = [*history, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]
    output = llm.chat(more, one, use_tqdm=False)[0]
    assert texts.num_tokenized_bytes - before < 60
    tokenizer = llm.get_tokenizer()
    plain = tokenizer.apply_chat_template(more, add_generation_prompt=True, return_dict=True)
    assert output.prompt_token_ids == plain["input_ids"]


def test_an_answer_that_is_rendered_otherwise_is_tokenized_plainly(llm: LLM):
    """Stripped, or rewritten: the longest beginning in common counts, and nothing else is kept."""
    question = [{"role": "user", "content": "Tell me."}]
    output = llm.chat(question, sampled(3, allowed_token_ids=[6, 7, 8]), use_tqdm=False)[0]
    rewritten = [*question, {"role": "assistant", "content": "x" + output.outputs[0].text}]
    again = llm.chat(rewritten, sampled(4), use_tqdm=False)[0]
    tokenizer = llm.get_tokenizer()
    plain = tokenizer.apply_chat_template(rewritten, add_generation_prompt=True, return_dict=True)
    assert again.prompt_token_ids == plain["input_ids"] and again.num_kept_tokens == 0


def test_white_space_that_a_template_drops_behind_an_answer_costs_no_more_than_itself(llm: LLM):
    space = llm.get_tokenizer()("\n", add_special_tokens=False)["input_ids"][-1]
    question = [{"role": "user", "content": "Tell me more."}]
    output = llm.chat(question, sampled(5), use_tqdm=False)[0]
    words = output.outputs[0].token_ids
    first = output.prompt_token_ids
    texts = llm.engine.texts
    assert texts is not None
    known = texts.finish(llm.engine.prompts.begin_text(texts_of(llm, question), Prompt()))
    texts.known.note_answer(b"", known, array("I", [*words, space, space]))
    told = llm.get_tokenizer().decode(words)
    following = [*question, {"role": "assistant", "content": told}]
    again = llm.chat(following, sampled(6), use_tqdm=False)[0]
    assert again.prompt_token_ids[: len(first) + len(words)] == [*first, *words]


def texts_of(llm: LLM, messages: list[dict[str, str]]) -> str:
    text = llm.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return str(text)


# --- whose it is, and what is told ------------------------------------------------------------


def num_tokenized(llm: LLM, text: str, **whose: Any) -> int:
    """Count the bytes of a text that are not known to the sender of a prompt."""
    return llm.engine.prompts.begin_text(text, Prompt(**whose)).num_left


def texts_after(llm: LLM, **prompt: Any) -> int:
    """Have a text of 24 bytes computed on a fresh memory; returns how many texts are known then."""
    llm.reset_prefix_cache()
    one = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate({"prompt": "<bos>what is known?<eos>", **prompt}, one, use_tqdm=False)
    texts = llm.engine.texts
    assert texts is not None
    texts.known.check()
    return len(texts.known)


def test_what_is_known_is_a_tenant_s_own_and_goes_with_it(llm: LLM):
    text = "<bos>what is known?<eos>"
    assert texts_after(llm, cache_salt="ann") == 1
    assert num_tokenized(llm, text, cache_salt="ann") == 0
    assert num_tokenized(llm, text, cache_salt="bob") == num_tokenized(llm, text) == len(text)
    assert num_tokenized(llm, text, cache_salt="ann", keep_tokens=False) == len(text)
    assert llm.erase("bob").num_texts == 0 and llm.erase("ann").num_texts == 1
    assert num_tokenized(llm, text, cache_salt="ann") == len(text)
    for left_out in ("cache_write", "keep_tokens"):
        assert texts_after(llm, **{left_out: False}) == 0


def test_new_weights_know_no_text(llm: LLM):
    assert texts_after(llm) == 1
    name, weight = next(iter(llm.engine.loaded.model.state_dict().items()))
    llm.update_weights({name: weight.clone()})
    assert num_tokenized(llm, "<bos>what is known?<eos>") == len("<bos>what is known?<eos>")


def test_the_text_of_a_public_prefix_is_known_to_those_who_may_read_it(llm: LLM):
    manual = "<bos>" + "This is the manual. Read it with care. " * 4 + "<eos>"
    llm.publish("manual", manual + "<bos>" * 16)
    reader = {"cache_salt": "carl", "public_prefixes": ("manual",)}
    assert num_tokenized(llm, manual + "hi", **reader) == len("hi")
    assert num_tokenized(llm, manual + "hi", cache_salt="carl") == len(manual + "hi")
    llm.unpublish("manual")
    assert num_tokenized(llm, manual + "hi", **reader) == len(manual + "hi")


def test_an_explanation_says_how_many_tokens_were_kept(llm: LLM):
    messages = [{"role": "user", "content": "Well?"}]
    [first] = llm.chat(messages, sampled(8), use_tqdm=False)
    messages.append({"role": "assistant", "content": first.outputs[0].text})
    [second] = llm.chat([*messages, {"role": "user", "content": "So?"}], sampled(9), use_tqdm=False)
    assert second.num_kept_tokens == 12
    explanation = llm.explain(second)
    assert "12 tokens were kept as generated, in the answers of earlier turns." in str(explanation)
    assert type(explanation).from_dict(explanation.as_dict()) == explanation

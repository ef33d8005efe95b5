"""The cost of a request is proportional to its size."""

import asyncio
import threading
from typing import Any, cast

import pytest

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.core.errors import PromptTooLong, TokenOutOfRange
from ostinato.core.tokens import pack_tokens
from ostinato.engine.prompts.text_tokenizer import PartialText, TextTokenizer
from ostinato.engine.requests.request_validation import check_vocabulary, refuse_long_text
from ostinato.engine.text.detokenizer import TokenTable


async def test_each_log_probability_is_written_once_however_long_the_stream(
    monkeypatch: pytest.MonkeyPatch,
):
    """Every output of a stream holds all that came before; that is shared, not made anew."""
    named = 0
    text = TokenTable.text

    def count(table: TokenTable, token_id: int) -> str:
        nonlocal named
        named += 1
        return text(table, token_id)

    monkeypatch.setattr(TokenTable, "text", count)
    params = SamplingParams(max_tokens=40, logprobs=4, prompt_logprobs=2, ignore_eos=True)

    async with AsyncLLM(num_blocks=64) as llm:
        async for output in llm.generate("To be, or not", params):
            [part] = output.outputs
            assert part.logprobs is not None
            assert len(part.logprobs) == len(part.token_ids)
        total = sum(next(iter(position.values())).logprob for position in part.logprobs)
        assert part.cumulative_logprob == pytest.approx(total)
    assert named <= 40 * 5 + 13 * 3


def test_a_text_far_too_long_is_refused_before_all_of_it_is_tokenized():
    """Ten million characters for a context of 64 tokens: a piece or two of them are looked at."""
    num_characters = 0

    def count(text: str, **settings: Any) -> dict[str, list[int]]:
        nonlocal num_characters
        num_characters += len(text)
        return {"input_ids": [0] * (len(text) // 4)}

    with pytest.raises(PromptTooLong, match=r"10000000 characters.*max_model_len=64"):
        refuse_long_text("ab" * 5_000_000, 64, cast(Any, count))
    assert num_characters < 100_000


def test_a_text_of_few_tokens_is_served_however_long_it_is():
    """Where a tokenizer makes one token of a thousand characters, length alone says nothing."""
    refuse_long_text("x" * 1_000_000, 64, cast(Any, lambda text, **_: {"input_ids": [0] * 17}))


@pytest.mark.parametrize("make", ["LLM", "AsyncLLM"])
def test_both_faces_refuse_a_text_far_too_long(make: str, monkeypatch: pytest.MonkeyPatch):
    """The message names the setting."""
    text = "To be " * 20_000
    with pytest.raises(PromptTooLong, match=r"120000 characters.*raise max_model_len"):
        if make == "LLM":
            LLM(num_blocks=64, max_model_len=64).generate(text, use_tqdm=False)
        else:
            asyncio.run(_first_of_stream(text))


async def _first_of_stream(text: str) -> None:
    async with AsyncLLM(num_blocks=64, max_model_len=64) as llm:
        await anext(llm.generate(text))


async def test_short_texts_do_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch):
    """Bob is answered while Ann's book is being tokenized: it takes until then, here.

    Nor does a long text of his that is known but for its last word.
    """
    answered = threading.Event()

    def slow(texts: TextTokenizer, partly: PartialText, *arguments: Any, **more: Any) -> Any:
        if partly.num_left > 1000:
            assert answered.wait(60)
        return finish(texts, partly, *arguments, **more)

    finish = TextTokenizer.finish
    monkeypatch.setattr(TextTokenizer, "finish", slow)

    async def read(llm: AsyncLLM, text: str) -> None:
        async for _ in llm.generate(text, SamplingParams(max_tokens=1)):
            pass

    async with AsyncLLM(num_blocks=64) as llm:
        texts, history = llm.engine.texts, "all the men " * 9000 + "<eos>"
        assert texts is not None
        texts.known.note(b"", finish(texts, texts.begin(history, ())))
        book = asyncio.create_task(read(llm, "all the world " * 3000))
        await read(llm, "hi")
        assert len(await llm.encode(history + "and women")) == 108_010
        answered.set()
        with pytest.raises(PromptTooLong):
            await book


def test_ids_outside_a_model_vocabulary_are_refused():
    check_vocabulary(pack_tokens([0, 9]), vocab_size=10)
    check_vocabulary(pack_tokens([]), vocab_size=10)
    with pytest.raises(TokenOutOfRange, match=r"token id 10 at position 1.*from 0 to 9"):
        check_vocabulary(pack_tokens([0, 10, 11]), vocab_size=10)

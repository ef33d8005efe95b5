"""Public prefixes as a user meets them: published once, shared by all who may, private behind."""

import asyncio

import pytest

from ostinato import LeaseStatus, SamplingParams
from ostinato.core.errors import RequestError
from tests.engine.loop.stepping import async_llm, last
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints

FOUR = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, ignore_eos=True)
MANUAL = list(range(10, 31))  # five whole blocks of four, and one token more
TAIL = list(range(40, 50))


def asked(tokens: list[int], salt: str, names: tuple[str, ...] = ("manual",)) -> dict:
    """Return a prompt of a tenant that may read public prefixes."""
    return {"prompt_token_ids": tokens, "cache_salt": salt, "public_prefixes": names}


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_tenants_share_a_public_prefix_and_answer_as_without_it(make_llm: MakeLLM, model, index):
    """Law 7, with a window as well; the second tenant finds the head, the first its own tail."""
    llm = make_llm(model, index=index, num_blocks=64, max_model_len=64)
    alone = llm.generate(MANUAL + TAIL, FOUR, use_tqdm=False)[0]
    receipt = llm.publish("manual", MANUAL)
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.ACCEPTED, 20)

    def generate(*how):
        return llm.generate(asked(MANUAL + TAIL, *how), FOUR, use_tqdm=False)[0]

    answers = [generate("a"), generate("b"), generate("a"), generate("c", ())]
    assert [answer.num_cached_tokens for answer in answers] == [20, 20, 30, 0]
    for answer in answers:
        assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
    assert llm.unpublish("manual").num_blocks >= 5 + 2 * 3
    assert generate("a").num_cached_tokens == 0


def test_of_several_public_prefixes_the_longest_counts(make_llm: MakeLLM):
    llm = make_llm("llama", num_blocks=64, max_model_len=64)
    llm.publish("short", MANUAL[:8])
    llm.publish("long", MANUAL[:16])
    for names, cached in ((("short",), 8), (("short", "long"), 16), (("*",), 16)):
        prompt = asked(MANUAL, str(names), names)
        assert llm.generate(prompt, FOUR, use_tqdm=False)[0].num_cached_tokens == cached
    listed = llm.engine.public_prefixes.listed()
    assert [(known.name, len(known.tokens)) for known in listed] == [("long", 16), ("short", 8)]
    for name in ("short", "long"):
        llm.unpublish(name)


def test_a_reset_ends_a_publication_and_it_can_be_published_again(make_llm: MakeLLM):
    llm = make_llm("llama", num_blocks=64, max_model_len=64)
    llm.publish("manual", MANUAL)
    llm.reset_prefix_cache()
    assert [known.is_held for known in llm.engine.public_prefixes.listed()] == [False]
    assert llm.generate(asked(MANUAL, "a"), FOUR, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.publish("manual", MANUAL).status is LeaseStatus.ACCEPTED
    assert llm.generate(asked(MANUAL, "b"), FOUR, use_tqdm=False)[0].num_cached_tokens == 20
    llm.unpublish("manual")


def test_what_cannot_be_published_is_refused_with_a_reason(make_llm: MakeLLM):
    """Law 6: afterwards nothing of it is there."""
    llm = make_llm("llama", num_blocks=24, max_model_len=64)
    with pytest.raises(RequestError, match="whole blocks of 4"):
        llm.publish("manual", [5, 6, 7])
    with pytest.raises(RequestError, match="needs a name"):
        llm.publish("*", MANUAL)
    with pytest.raises(RequestError, match="no public prefix"):
        llm.unpublish("manual")
    receipt = llm.publish("manual", list(range(10, 60)))
    assert receipt.status is LeaseStatus.REJECTED and "num_blocks" in receipt.reason
    assert llm.engine.public_prefixes.listed() == []
    llm.publish("manual", MANUAL)
    with pytest.raises(RequestError, match="public already"):
        llm.publish("manual", TAIL)
    llm.unpublish("manual")


async def test_an_event_loop_publishes_and_takes_back_as_well(checkpoints: Checkpoints):
    with async_llm(checkpoints) as llm:
        await llm.publish("manual", MANUAL)
        both = [last(llm.generate(asked(MANUAL, salt), FOUR)) for salt in "ab"]
        answers = await asyncio.gather(*both)
        assert [answer.num_cached_tokens for answer in answers] == [20, 20]
        receipt = await llm.unpublish("manual")
        assert receipt.num_leases == 1 and receipt.num_zeroed_slots > 0
        answer = await last(llm.generate(asked(MANUAL, "a"), FOUR))
        assert answer.num_cached_tokens == 0

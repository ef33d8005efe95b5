"""A share of the hits is computed again, and wrong keys and values are found."""

import logging
from array import array

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.core.identity import PrefixKey
from ostinato.engine.loop.snapshot import take_snapshot
from ostinato.engine.requests.prompts import Prompt
from tests.engine.async_calls import run
from tests.engine.stepping import async_llm
from tests.support.checkpoints import Checkpoints
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library
from tests.support.waiting import until

pytestmark = needs_library

PROMPT = list(range(3, 93))
ONE = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
AUDITED = {"dtype": "float32", "block_size": 16, "audit_share": 1.0}
WINDOW = {"sliding_window": 40}


def send(llm: LLM, prompt: list[int] = PROMPT, salt: str = "") -> int:
    """Return how many tokens hit."""
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt}]
    [output] = llm.generate(prompts, ONE, use_tqdm=False)
    return output.num_cached_tokens


def flip_a_bit(llm: LLM, group: int, place: int, layer: int) -> None:
    """Change the last bit of one number of one key of a cached block of ``PROMPT``."""
    engine = llm.engine
    table = engine.cache.manager.pin(
        PrefixKey(engine.identities.of_tenant(""), PROMPT), len(PROMPT)
    )
    slot = torch.tensor([table.groups[group][place] * 16 + 5])
    engine.cache.manager.unpin(table)
    store = engine.runner.kv_stores[group]
    keys, values = store.read(layer, slot)
    keys.view(torch.int32)[0, 0, 3] ^= 1
    store.write(layer, keys, values, slot)


def test_hits_have_the_bits_that_the_model_computes(index: str, make_llm: MakeLLM):
    """Prompts that leave each other within a block; the whole blocks of every hit are compared."""
    llm = make_llm("llama", index=index, max_num_batched_tokens=23, max_num_seqs=4, **AUDITED)

    hits = [send(llm, [*PROMPT[:n], 200]) for n in (90, 90, 70, 41, 60)]

    counts = llm.engine.audit.counts
    assert (counts.num_drawn, counts.num_same, counts.num_different) == (4, 4, 0)
    assert counts.num_tokens == sum(hit // 16 * 16 for hit in hits) > 200


@pytest.mark.parametrize(("family", "group"), [("llama", 0), ("mistral", 1)])
def test_a_flipped_bit_is_found_and_its_prefix_quarantined(
    index: str, family: str, group: int, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
):
    """What comes before it is kept; another prompt that continues it is removed as well."""
    config = {"num_hidden_layers": 3} | (WINDOW if family == "mistral" else {})
    llm = make_llm(family, config=config, index=index, **AUDITED)
    send(llm)
    send(llm, PROMPT[:64] + [200] * 20)
    flip_a_bit(llm, group, place=3, layer=2)

    with caplog.at_level(logging.ERROR, "ostinato"):
        send(llm)

    counts = llm.engine.audit.counts
    [finding] = counts.findings
    assert (finding.first_token, finding.layers[0]) == (3 * 16 + 5, 2)
    assert counts.num_different == 1 and counts.num_removed == finding.num_removed > 2
    assert str(finding.cached_blocks) in caplog.text and str(finding.computed_blocks) in caplog.text
    assert send(llm, PROMPT[:64] + [200] * 20) <= 64 - 16
    send(llm)
    assert send(llm) == len(PROMPT) - 1
    assert llm.engine.audit.counts.num_different == 1


def test_without_quarantine_a_wrong_prefix_is_reported_and_stays(make_llm: MakeLLM):
    llm = make_llm("llama", audit_quarantine=False, **AUDITED)
    send(llm)
    flip_a_bit(llm, 0, place=0, layer=0)

    assert send(llm) == send(llm) == len(PROMPT) - 1

    counts = llm.engine.audit.counts
    assert (counts.num_different, counts.num_removed) == (2, 0)


def draw(llm: LLM, salt: str) -> None:
    """Let a hit of ``PROMPT`` wait for an idle moment."""
    prompt = Prompt(token_ids=array("I", PROMPT), cache_salt=salt)
    llm.engine.audit.note(llm.engine.make_request(prompt, ONE).request, 80)


def test_what_the_cache_has_removed_meanwhile_is_not_compared(make_llm: MakeLLM):
    """Before its turn, and while it is computed again."""
    llm = make_llm("llama", **AUDITED)
    send(llm)
    audit = llm.engine.audit
    for chunks in (0, 2):
        draw(llm, "")
        for _ in range(chunks):
            assert audit.run_idle_work()
        llm.reset_prefix_cache()
        while audit.run_idle_work():
            pass
        send(llm)

    assert (audit.counts.num_drawn, audit.counts.num_gone, audit.counts.num_same) == (2, 2, 0)


def test_nothing_of_a_tenant_that_is_erased_is_computed_again(make_llm: MakeLLM):
    llm = make_llm("llama", **AUDITED)
    for salt in ("ann", "bob"):
        send(llm, salt=salt)
    for salt in ("ann", "ann", "bob"):
        draw(llm, salt)
    llm.engine.audit.run_idle_work()  # one of ann's has begun

    llm.erase("ann")

    while llm.engine.audit.run_idle_work():
        pass
    assert llm.engine.audit.counts.num_same == 1


def test_it_is_refused_where_bits_may_differ(make_llm: MakeLLM):
    with pytest.raises(ConfigError, match=r"audit_share=0\.5: cached keys agree to the bit"):
        make_llm("llama", dtype="float32", block_size=16, attention="torch", audit_share=0.5)
    with pytest.raises(ConfigError, match=r"audit_share=2: must be a number from 0 to 1"):
        make_llm("llama", audit_share=2)


def test_a_server_computes_hits_again_while_it_is_idle(checkpoints: Checkpoints):
    with async_llm(checkpoints, max_model_len=128, **AUDITED) as llm:

        async def story() -> None:
            for _ in range(2):
                async for _ in llm.generate({"prompt_token_ids": PROMPT}, ONE):
                    pass
            await until(lambda: llm.engine.audit.counts.num_same)

        run(story())
        seen = take_snapshot(llm.engine).audit

    assert (seen.num_drawn, seen.num_tokens, seen.findings) == (1, 80, ())


def test_audits_of_a_model_with_a_module_that_is_called_are_refused(checkpoints: Checkpoints):
    """Its other parts are computed by the library, but nothing promises the module's bits."""
    path = str(checkpoints.path("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"audit_share=1\.0: cached keys agree to the bit"):
        LLM(path, dtype="bfloat16", num_blocks=32, block_size=16, audit_share=1.0)

"""A share of the hits is computed again, and wrong keys and values are found."""

import logging
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.core.identity import PrefixKey
from ostinato.engine.loop.snapshot import take_snapshot
from ostinato.engine.requests.prompts import Prompt
from ostinato.hybrid.manager import HybridCacheManager
from tests.engine.api.async_calls import run
from tests.engine.loop.stepping import async_llm
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library
from tests.support.models.adapters import save_adapter
from tests.support.models.checkpoints import Checkpoints
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


ROUNDED = [
    ("qwen3_moe", {"dtype": "bfloat16"}),
    ("lfm2", {"dtype": "bfloat16"}),
    ("qwen3_next", {"dtype": "float32"}),
    ("llama", {"dtype": "float32", "attention": "torch"}),
]
"""Models whose bits are not promised: a module is called, layers carry states, or torch attends."""

LONG = [3 + i * i % 250 for i in range(200)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *ROUNDED,
        *(
            pytest.param(family, {"dtype": dtype}, marks=pytest.mark.nightly)
            for family in ("mixtral", "gpt_oss", "falcon_h1", "bamba", "mamba2", "deepseek_v3")
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_hits_agree_up_to_rounding_where_bits_are_not_promised(
    family: str, settings: dict[str, Any], make_llm: MakeLLM
):
    """Computed in long chunks beside others, and again alone in chunks of 64."""
    settings = {**AUDITED, **settings, "num_blocks": 200}
    llm = make_llm(family, max_num_batched_tokens=160, max_num_seqs=4, **settings)
    ends = (200, 180, 150, 130)
    for _ in range(2):
        prompts = [{"prompt_token_ids": [*LONG[:n], 200]} for n in ends]
        llm.generate(prompts, ONE, use_tqdm=False)

    counts = llm.engine.audit.counts
    assert counts.num_different == 0 and counts.num_same >= 4 and counts.num_tokens > 400


@pytest.mark.parametrize(("family", "settings"), ROUNDED)
def test_a_row_of_other_tokens_is_noticed_where_bits_are_not_promised(
    family: str, settings: dict[str, Any], make_llm: MakeLLM
):
    """What is written in place of a block of keys, as by a wrong copy, is removed."""
    llm = make_llm(family, **AUDITED | settings)
    send(llm, LONG)
    engine = llm.engine
    table = engine.cache.manager.pin(PrefixKey(engine.identities.of_tenant(""), LONG), 128)
    blocks = table.groups[0]
    engine.cache.manager.unpin(table)
    store = engine.runner.kv_stores[0]
    layer = store.layers[-1]
    slots = torch.arange(16)
    keys, values = store.read(layer, slots + 16 * blocks[6])
    store.write(layer, keys, values, slots + 16 * blocks[3])

    send(llm, LONG)

    [finding] = engine.audit.counts.findings
    assert (finding.first_token, finding.layers, engine.audit.counts.num_same) == (48, (layer,), 0)
    send(llm, LONG)
    send(llm, LONG)
    counts = engine.audit.counts
    assert (counts.num_different, counts.num_same) == (1, 1)


def test_a_wrong_state_is_noticed_and_removed(make_llm: MakeLLM):
    """The checkpoint in the middle of a prompt: what comes before it is kept."""
    llm = make_llm("lfm2", **{**AUDITED, "dtype": "bfloat16", "num_blocks": 200})
    for end in (128, 200):
        send(llm, LONG[:end])
    engine = llm.engine
    manager = engine.cache.manager
    assert isinstance(manager, HybridCacheManager)
    key = PrefixKey(engine.identities.of_tenant(""), LONG)
    kept = dict(manager.layer_groups[-1].kept(key, 12))
    layer, slot = next(iter(engine.runner.states.spec.layers)), kept[max(kept)]
    engine.runner.states.states(layer)[0][slot].neg_()

    send(llm, [*LONG[:195], 7])

    [finding] = engine.audit.counts.findings
    assert finding.first_token == 64 * (max(kept) + 1) - 1 and finding.layers == (layer,)
    assert finding.cached_blocks[-1][-1] == slot and finding.num_removed > 0
    assert max(kept) not in dict(manager.layer_groups[-1].kept(key, 12))
    assert send(llm, LONG) < finding.first_token


def test_hits_of_an_adapter_are_computed_with_it(checkpoints: Checkpoints, tmp_path: Path):
    path = checkpoints.path("llama")
    save_adapter(path, tmp_path / "adapter", 1)
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with LLM(str(path), num_blocks=32, enable_lora=True, **AUDITED) as llm:
        for _ in range(2):
            prompt = {"prompt_token_ids": PROMPT}
            llm.generate(prompt, ONE, use_tqdm=False, lora_request=request)
        counts = llm.engine.audit.counts
    assert (counts.num_same, counts.num_different) == (1, 0)


def test_a_share_is_refused_beyond_one(make_llm: MakeLLM):
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

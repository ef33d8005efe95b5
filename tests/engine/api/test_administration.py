"""Leases, shares of tenants and erasure, as a user meets them."""

import pytest

from ostinato import LLM, OPENAI_24H, LeaseStatus, LeaseTerms, TenantShare
from ostinato.engine.api.admin_api import AdminApi
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.settings.config import EngineConfig
from ostinato.errors import ConfigError, RequestError
from tests.engine.tenant_calls import (
    ONE,
    PROMPT,
    SALT,
    SMALL,
    flood,
    num_hits,
    salted_prompt,
    tokens_of,
)
from tests.support.engines import MakeLLM, assert_idle
from tests.support.models.checkpoints import Checkpoints

# --- leases -------------------------------------------------------------------------------


def test_a_leased_prompt_hits_after_a_flood_and_a_released_one_does_not(make_llm: MakeLLM, index):
    llm = make_llm("llama", index=index, **SMALL)
    llm.generate(PROMPT, ONE, use_tqdm=False)
    receipt = llm.lease(PROMPT)
    assert (receipt.status, receipt.num_tokens, receipt.reason) == (LeaseStatus.ACCEPTED, 24, "")
    flood(llm)
    assert num_hits(llm, PROMPT) == 23
    assert llm.end_lease(receipt.lease_id)
    assert not llm.end_lease(receipt.lease_id)
    flood(llm)
    assert num_hits(llm, PROMPT) == 0


def test_a_lease_takes_what_generate_takes(make_llm: MakeLLM):
    """A text, ids, and a dict with a salt; each names the blocks of that prompt."""
    llm = make_llm("llama", **SMALL)
    text = "The same prefix, another suffix"
    llm.generate([text, salted_prompt(PROMPT, SALT)], ONE, use_tqdm=False)
    receipts = [llm.lease(text), llm.lease(salted_prompt(PROMPT, SALT), OPENAI_24H)]
    assert [receipt.status for receipt in receipts] == [LeaseStatus.ACCEPTED] * 2
    assert receipts[0].expires_s is None and receipts[1].expires_s is not None
    assert llm.lease(PROMPT).status is LeaseStatus.REJECTED, "it was never served without a salt"
    assert all(llm.end_lease(receipt.lease_id) for receipt in receipts)


def test_a_time_to_live_runs_by_the_engine_s_clock(checkpoints: Checkpoints):
    """Ten seconds from each hit, as asked; the step after its end finds the lease gone."""
    now = [0.0]
    config = EngineConfig.of(checkpoints.path("llama"), {"block_size": 4, **SMALL})
    engine = Engine(config, lambda: now[0])
    administration = AdminApi(engine)
    serve(engine, PROMPT)
    receipt = administration.lease(Prompt(token_ids=PROMPT), LeaseTerms(10.0, refresh_on_hit=True))
    assert receipt.expires_s == 10.0
    for now[0], leases in ((9.0, 1), (18.0, 1), (28.0, 0)):
        serve(engine, PROMPT if leases else tokens_of(0))
        assert engine.cache.admin.num_leases == leases
    assert_idle(engine)


def serve(engine: Engine, prompt: list[int]) -> None:
    """Run a request to its end."""
    engine.add(engine.make_request(Prompt(token_ids=prompt), ONE))
    while engine.has_work:
        engine.step()


def test_where_the_longest_sequence_needs_every_block_a_lease_says_what_to_change(
    make_llm: MakeLLM,
):
    llm = make_llm("llama", num_blocks=16, max_model_len=64)
    llm.generate(PROMPT, ONE, use_tqdm=False)
    receipt = llm.lease(PROMPT)
    assert receipt.status is LeaseStatus.REJECTED
    assert "0 of 16 blocks" in receipt.reason and "max_model_len" in receipt.reason


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([10, 9999], "token id 9999 at position 1"),
        (5, "a prompt must be"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, "cache_salt=5"),
    ],
)
def test_what_is_no_prompt_cannot_be_leased_and_the_engine_goes_on(
    make_llm: MakeLLM, prompt, message
):
    llm = make_llm("llama", **SMALL)
    with pytest.raises(RequestError, match=message):
        llm.lease(prompt)
    assert llm.generate(PROMPT, ONE, use_tqdm=False)[0].finished


# --- guarantees and quotas --------------------------------------------------------------------


def test_a_guarantee_keeps_a_tenant_s_prompt_through_a_neighbour_s_flood(make_llm: MakeLLM, index):
    """Six blocks of 32 are its own; the neighbour's hundred prompts fill the pool many times."""
    llm = make_llm("llama", index=index, tenant_shares={SALT: TenantShare(guaranteed=6)}, **SMALL)
    llm.generate([salted_prompt(PROMPT, SALT), PROMPT], ONE, use_tqdm=False)
    flood(llm, 100)
    assert num_hits(llm, PROMPT, salt=SALT) == 23
    assert num_hits(llm, PROMPT) == 0


def test_a_quota_bounds_what_a_tenant_keeps(make_llm: MakeLLM, index):
    llm = make_llm("llama", index=index, tenant_shares={SALT: TenantShare(quota=2)}, **SMALL)
    llm.generate([salted_prompt(PROMPT, SALT), PROMPT], ONE, use_tqdm=False)
    assert num_hits(llm, PROMPT, salt=SALT) == 8
    assert num_hits(llm, PROMPT) == 23


def test_floors_that_leave_too_little_are_refused_with_what_to_change(checkpoints: Checkpoints):
    """32 blocks, 16 of them for the longest sequence: seventeen cannot be promised."""
    guarantees = {"a": TenantShare(guaranteed=9), "b": TenantShare(guaranteed=8)}
    with pytest.raises(ConfigError) as refusal:
        LLM(str(checkpoints.path("llama")), block_size=4, tenant_shares=guarantees, **SMALL)
    for words in (
        "sum to 17 blocks",
        "only 16",
        "num_blocks=32",
        "lower guarantees or max_model_len",
    ):
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("tenant_shares", "message"),
    [
        ({b"a": TenantShare()}, r"tenant_shares\[b'a'\]"),
        ({"a": {"guaranteed": 1}}, r"tenant_shares\['a'\]=.*must map a cache_salt"),
        (["a"], r"tenant_shares=\['a'\]: must be a mapping"),
    ],
)
def test_shares_that_are_none_are_refused(tenant_shares, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(tenant_shares=tenant_shares)


@pytest.mark.parametrize("bounds", [{"guaranteed": 1.5}, {"quota": "many"}, {"guaranteed": True}])
def test_a_share_is_a_whole_number_of_blocks(bounds):
    with pytest.raises(ConfigError, match="must be an integer, in blocks"):
        TenantShare(**bounds)

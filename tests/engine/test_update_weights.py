"""New weights: nothing old hits, outputs are those of a fresh engine, and running requests end."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, LeaseStatus, SamplingParams
from ostinato.errors import BrokenCheckpoint, ConfigError, ModelError
from tests.engine.loop.stepping import StepByStep, async_llm, last
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.waiting import queued_commands, until

NAME = "model.layers.1.mlp.up_proj.weight"
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
LONG = SamplingParams(max_tokens=30, temperature=0.0, detokenize=False, ignore_eos=True)
PROMPT = list(range(10, 34))
SMALL = {"num_blocks": 32, "max_model_len": 64}


def outputs(llm: LLM, prompt: list[int] = PROMPT) -> tuple[int, list[int]]:
    """Return how many tokens hit, and the greedy tokens."""
    [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids


def changed(llm_or_path: LLM | Path, name: str = NAME) -> dict[str, torch.Tensor]:
    """Return one weight of a checkpoint or an engine, turned around."""
    if isinstance(llm_or_path, LLM):
        weights = llm_or_path.engine.loaded.model.state_dict()
    else:
        weights = load_file(llm_or_path / "model.safetensors")
    return {name: -weights[name].clone()}


def changed_checkpoint(path: Path, target: Path) -> Path:
    """Copy a checkpoint and turn one weight of it around."""
    shutil.copytree(path, target)
    weights = load_file(target / "model.safetensors") | changed(path)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fresh_outputs(path: Path) -> list[int]:
    """Return what an engine that never had other weights generates."""
    llm = LLM(str(path), dtype="float64", block_size=4, **SMALL)
    return outputs(llm)[1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_after_one_weight_changed_nothing_hits_and_outputs_are_those_of_a_fresh_engine(
    make_llm: MakeLLM, checkpoints: Checkpoints, tmp_path: Path, family: str, index: str
):
    """Before: all but one token hit. After: none, and other tokens come out; then all hit again."""
    llm = make_llm(family, own_weights=True, index=index, **SMALL)
    old = outputs(llm)[1]
    assert outputs(llm) == (23, old)

    assert llm.update_weights(changed(llm)) == 1
    fresh = changed_checkpoint(checkpoints.path(family), tmp_path / "changed")
    expected = fresh_outputs(fresh)
    assert expected != old, "the weight matters"
    assert outputs(llm) == (0, expected)
    assert outputs(llm) == (23, expected)


def test_a_checkpoint_replaces_all_weights_and_brings_its_fingerprint(
    make_llm: MakeLLM, checkpoints: Checkpoints, tmp_path: Path
):
    """An engine that was started on it has the same identity, so that both could share KV."""
    path = changed_checkpoint(checkpoints.path("llama"), tmp_path / "changed")
    llm, fresh = (
        make_llm("llama", own_weights=True, **SMALL),
        LLM(str(path), dtype="float64", block_size=4, **SMALL),
    )
    old = outputs(llm)[1]
    llm.update_weights(path)
    assert outputs(llm) == (0, outputs(fresh)[1]) != (0, old)
    assert llm.engine.loaded.fingerprint == fresh.engine.loaded.fingerprint
    llm.update_weights(str(checkpoints.path("llama")))
    assert outputs(llm) == (0, old), "the old weights again, but nothing old hits"


def test_a_changed_weight_changes_the_fingerprint_and_a_second_change_does_so_again(
    make_llm: MakeLLM,
):
    llm = make_llm("llama", own_weights=True, **SMALL)
    seen = [llm.engine.loaded.fingerprint]
    for _ in range(2):
        llm.update_weights(changed(llm))
        seen.append(llm.engine.loaded.fingerprint)
    assert len(set(seen)) == 3
    assert all(len(fingerprint) == 32 for fingerprint in seen)


def test_tied_weights_change_together(make_llm: MakeLLM):
    """The embedding is the output layer as well; two values for it are refused."""
    llm = make_llm("qwen2", own_weights=True, **SMALL)
    update = changed(llm, "model.embed_tokens.weight")
    other = {"lm_head.weight": update["model.embed_tokens.weight"] + 1}
    with pytest.raises(ConfigError, match=r"'lm_head.weight' and 'model.embed_tokens.weight'"):
        llm.update_weights(update | other)
    llm.update_weights(update)
    weights = llm.engine.loaded.model.state_dict()
    assert torch.equal(weights["lm_head.weight"], update["model.embed_tokens.weight"])


def test_leases_end_with_the_weights(make_llm: MakeLLM):
    llm = make_llm("llama", own_weights=True, **SMALL)
    outputs(llm)
    receipt = llm.lease(PROMPT)
    assert receipt.status is LeaseStatus.ACCEPTED
    llm.update_weights(changed(llm))
    assert not llm.end_lease(receipt.lease_id)
    assert llm.engine.cache.manager.pool.num_free == 32


# --- what does not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({}, "names no weight"),
        ({"nonesuch": torch.zeros(2)}, "weight 'nonesuch': the model has none"),
        ({NAME: [1.0]}, f"weight '{NAME}' is a list"),
        ({NAME: torch.zeros(3, dtype=torch.float64)}, r"has shape \(3,\), but .* \(64, 48\)"),
        ({NAME: torch.zeros(64, 48)}, r"is torch.float32, but .*\.to\(torch.float64\)"),
        (7, "not as int"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(make_llm: MakeLLM, update, message: str):
    """Also not those that stand before them in the same mapping."""
    llm = make_llm("llama", own_weights=True, **SMALL)
    expected = outputs(llm)[1]
    if isinstance(update, dict) and update:
        update = changed(llm, "model.layers.0.mlp.up_proj.weight") | update
    with pytest.raises(ConfigError, match=message):
        llm.update_weights(update)
    assert llm.engine.cache.manager.epoch == 0
    assert outputs(llm) == (23, expected)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ({"name": "missing weights"}, BrokenCheckpoint, r"model\.layers\.1\.mlp\.up_proj"),
        ({"name": "truncated"}, BrokenCheckpoint, "not a complete safetensors file"),
        ({"rope_theta": 77.0}, ConfigError, "its config says rope.*weights of another model"),
        ({"intermediate_size": 32}, ConfigError, "its config says intermediate_size=32"),
        ("no-such-directory/at/all", ModelError, "no such directory"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    make_llm: MakeLLM, checkpoints: Checkpoints, source, kind, message: str
):
    llm = make_llm("llama", own_weights=True, **SMALL)
    expected = outputs(llm)[1]
    if isinstance(source, dict):
        broken = "name" in source
        path = checkpoints.broken(**source) if broken else checkpoints.path("llama", **source)
    else:
        path = source
    with pytest.raises(kind, match=message):
        llm.update_weights(path)
    assert llm.engine.cache.manager.epoch == 0
    assert outputs(llm) == (23, expected)


# --- while requests run -------------------------------------------------------------------


async def test_running_requests_end_and_publish_nothing_and_who_waits_gets_the_new_weights(
    make_llm: MakeLLM, checkpoints: Checkpoints, tmp_path: Path
):
    """One runs, one waits for its seat. The second is computed as in a fresh engine, and hits."""
    path = changed_checkpoint(checkpoints.path("llama"), tmp_path / "changed")
    expected = fresh_outputs(path)

    with async_llm(checkpoints, max_num_seqs=1) as llm:
        steps = StepByStep(llm)
        running = asyncio.create_task(last(llm.generate(PROMPT[::-1], LONG, request_id="runs")))
        await steps.until(asyncio.create_task(until_running(llm)))
        waiting = asyncio.create_task(last(llm.generate(PROMPT, PARAMS, request_id="waits")))
        await steps.until(asyncio.create_task(until_waiting(llm)))
        updating = asyncio.create_task(llm.update_weights(path))
        await let_pass(steps, updating)
        assert updating.result() == 1
        assert not running.done() and not waiting.done()
        steps.go_on(1000)
        assert (await running).outputs[0].finish_reason == "length"
        assert len(running.result().outputs[0].token_ids) == 30
        assert (await waiting).outputs[0].token_ids == expected
        again = [await last(llm.generate(p, PARAMS)) for p in (PROMPT[::-1], PROMPT)]
        assert [output.num_cached_tokens for output in again] == [0, 23]


async def let_pass(steps: StepByStep, updating: asyncio.Task) -> None:
    """Let steps pass only while new weights wait for a step to end, until they are in use."""
    with queued_commands() as commands:
        while not updating.done():
            await until(lambda: commands or updating.done())
            steps.go_on()
            await until(lambda: not commands or updating.done())


async def until_running(llm) -> None:
    """Wait until a request runs."""
    await until(lambda: llm.engine.scheduler.num_running)


async def until_waiting(llm) -> None:
    """Wait until a request waits for a seat."""
    await until(lambda: llm.engine.scheduler.num_waiting and llm.engine.scheduler.num_running)


async def test_the_tokens_of_a_running_request_hang_on_the_weights_of_their_step(
    checkpoints: Checkpoints,
):
    """It goes on, on the KV that it has: its first tokens are the old ones, its last are not."""
    with async_llm(checkpoints) as llm:
        before = (await last(llm.generate(PROMPT, LONG))).outputs[0].token_ids
        steps = StepByStep(llm)
        running = asyncio.create_task(last(llm.generate(PROMPT, LONG)))
        await steps.until(asyncio.create_task(until_running(llm)))
        weights = llm.engine.loaded.model.state_dict()["lm_head.weight"]
        updating = asyncio.create_task(llm.update_weights({"lm_head.weight": -weights.clone()}))
        await let_pass(steps, updating)
        steps.go_on(1000)
        tokens = (await running).outputs[0].token_ids
        assert len(tokens) == 30
        assert tokens[0] == before[0] and tokens != before

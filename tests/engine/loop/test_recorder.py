"""A recording holds no content, gives the same hits again, and never harms the engine."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from ostinato import LLM, SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.core.identity import derive_salt
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.lab.replay.replay import Replay, ReplayedRequest
from ostinato.lab.traces.recording import Recording, read_recording
from ostinato.settings import TenantShare
from ostinato.tenants.terms import LeaseTerms
from ostinato.traces.anonymizer import unpack_names
from tests.engine.loop.stepping import StepByStep, async_llm
from tests.support.pairs import pairwise

SMALL = {
    "block_size": 4,
    "num_blocks": 30,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_chunk_tokens": 12,
    "max_num_seqs": 8,
}


def replayed(path: Path) -> tuple[Recording, list[ReplayedRequest]]:
    """Replay a recording and look at the cache afterwards."""
    recording = read_recording(path)
    replay = Replay(recording)
    requests = replay.run(lambda event: replay.cache.manager.check())
    assert replay.num_idle_steps == 0
    return recording, requests


def mixed_traffic(llm: LLM, seed: int, rounds: int = 5) -> None:
    """Send prompts that begin alike and part anywhere, more than the pool can hold."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3) for _ in range(32)] for _ in range(3)]
    for _ in range(rounds):
        prompts, params = [], []
        for _ in range(8):
            tail = [draw.randrange(3) for _ in range(draw.randrange(1, 8))]
            prompts.append(
                {
                    "prompt_token_ids": draw.choice(stems)[: draw.randrange(32)] + tail,
                    "cache_salt": draw.choice(["", "", "ann"]),
                    "cache_read": draw.random() > 0.1,
                    "cache_write": draw.random() > 0.1,
                }
            )
            params.append(
                SamplingParams(
                    n=draw.choice([1, 1, 2, 3]),
                    max_tokens=draw.randrange(1, 12),
                    stop_token_ids=[draw.randrange(64)],
                    prompt_logprobs=draw.choice([None, None, None, 1]),
                    detokenize=False,
                )
            )
        ranks = [draw.choice([0, 0, 1]) for _ in prompts]
        llm.generate(prompts, params, use_tqdm=False, priority=ranks)


@pairwise(
    "how",
    [("fcfs", "lru"), ("longest_prefix", "reuse_hazard"), ("fair_share", "lru")],
    "index",
    ["radix", "hash"],
)
def test_a_recorded_run_replays_to_the_same_hits(make_llm, tmp_path, index, how):
    """Chunks, preemptions, forks, tenants and priorities: every request finds what it found."""
    order, policy = how
    settings = {"index": index, "order": order, "eviction_policy": policy}
    llm = make_llm("llama", record_trace=tmp_path / "t", **settings, **SMALL)
    mixed_traffic(llm, seed=len(order))
    preemptions = llm.engine.scheduler_stats.num_preemptions
    llm.stop_recording()

    recording, requests = replayed(tmp_path / "t")
    assert recording.is_whole and len(requests) == 40
    assert all(request.agrees for request in requests)
    assert preemptions and any(request.recorded.copied for request in requests)
    assert sum(request.recorded.cached for request in requests) == (
        llm.cache_stats.first.hit_tokens
    )


def test_what_happens_between_steps_is_replayed_as_well(make_llm, tmp_path):
    """Cancelled requests, a failed step, a reset, leases, an erasure and new weights."""
    llm = make_llm("llama", own_weights=True, record_trace=tmp_path / "t", **SMALL)
    engine = llm.engine
    mixed_traffic(llm, seed=1, rounds=2)

    llm.lease({"prompt_token_ids": [1] * 20})  # rejected: nothing of it is cached
    llm.generate([[1] * 24], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    leased = llm.lease([1] * 20, LeaseTerms(60.0))
    mixed_traffic(llm, seed=2, rounds=1)
    assert leased.lease_id is not None
    llm.end_lease(leased.lease_id)

    execute, calls = engine.runner.execute, iter([True, True, False])

    def fail_once(plan):
        if next(calls, True):
            return execute(plan)
        raise RuntimeError("out of memory")

    engine.runner.execute = fail_once
    params = SamplingParams(max_tokens=9, n=2, detokenize=False)
    for number in range(6):
        prompt = parse_prompt([2] * (8 + number))
        engine.add(engine.make_request(prompt, params, str(number)))
    for _ in range(5):
        engine.step()
    engine.runner.execute = execute
    for number in range(6):
        engine.cancel(str(number))
    llm.reset_prefix_cache()
    mixed_traffic(llm, seed=3, rounds=1)
    llm.erase("ann")
    mixed_traffic(llm, seed=4, rounds=1)
    llm.update_weights(dict(engine.loaded.model.state_dict()))
    mixed_traffic(llm, seed=3, rounds=2)
    llm.stop_recording()

    recording, requests = replayed(tmp_path / "t")
    kinds = {type(event).__name__ for event in recording.events}
    assert kinds >= {"Failed", "Cancelled", "CacheReset", "Leased", "Erased", "NewEpoch"}
    assert all(request.agrees for request in requests)


def test_public_prefixes_and_shares_of_the_pool_are_replayed_by_pseudonym(make_llm, tmp_path):
    """What stands behind a published prefix is each tenant's own, and tenants have quotas."""
    shares = {"ann": TenantShare(guaranteed=2, quota=8)}
    llm = make_llm("llama", record_trace=tmp_path / "t", tenant_shares=shares, **SMALL)
    head = [5] * 10
    llm.publish("head", head)
    for number in range(12):
        salt = ["ann", derive_salt("ann", "x"), "bob"][number % 3]
        prompt = {
            "prompt_token_ids": [*head[: 6 + number], number % 4, 1, 2, 3, number],
            "cache_salt": salt,
            "public_prefixes": ["head"],
        }
        llm.generate([prompt], SamplingParams(max_tokens=5, detokenize=False), use_tqdm=False)
    llm.unpublish("head")
    mixed_traffic(llm, seed=6, rounds=2)
    llm.stop_recording()

    recording, requests = replayed(tmp_path / "t")
    assert any(added.head is not None for added in recording.added)
    assert len({added.tenant for added in recording.added}) >= 4
    assert all(request.agrees for request in requests)


def test_a_stop_string_ends_a_replayed_request_where_it_ended(bard, tmp_path):
    """It ends after its step, so its blocks come free behind those of the step."""
    bard.start_recording(tmp_path / "t")
    params = SamplingParams(max_tokens=24, n=2, stop=["e", "th"], seed=5)
    bard.generate(["ROMEO:", "JULIET:\nO Romeo", "ROMEO: now"], params, use_tqdm=False)
    bard.generate(["ROMEO: now", "JULIET:\nO"], params, use_tqdm=False)
    bard.stop_recording()

    recording, requests = replayed(tmp_path / "t")
    ends = [sequence for end in recording.ended.values() for sequence in end.sequences]
    assert any(end.by_string for end in ends)
    assert all(request.agrees for request in requests)


async def test_requests_from_an_event_loop_are_recorded_and_so_are_those_that_leave(
    checkpoints, tmp_path
):
    with async_llm(checkpoints, record_trace=str(tmp_path / "t")) as llm:
        steps = StepByStep(llm)
        params = SamplingParams(max_tokens=20, detokenize=False)
        streams = [llm.generate([1, 2, 3, 4, 5, 6, n], params, request_id=str(n)) for n in range(4)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await steps.until(asyncio.gather(*tasks))
        steps.go_on(1000)
        llm.abort("1")
        await streams[2].aclose()
        for stream in (streams[0], streams[1], streams[3]):
            async for _ in stream:
                pass
        await llm.stop_recording()
    recording, requests = replayed(tmp_path / "t")
    assert len(requests) == 4 and all(request.agrees for request in requests)
    reasons = [recording.ended[number].sequences[0].reason for number in range(4)]
    assert sorted(reasons) == ["abort", "abort", "length", "length"]


def test_a_trace_tells_where_prompts_part_and_nothing_else(bard, tmp_path):
    """No text, token or salt is in it, and a second recording has other names for the same."""
    prompts = [
        {"prompt": "To be, or not to be", "cache_salt": "very-secret-salt"},
        {"prompt": "To be, or not at all", "cache_salt": "very-secret-salt"},
    ]
    ids = [bard.get_tokenizer()(prompt["prompt"])["input_ids"] for prompt in prompts]
    common = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    names = []
    for path in (tmp_path / "a", tmp_path / "b"):
        bard.start_recording(path)
        assert bard.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
        assert bard.stop_recording() == path
        text = path.read_text()
        assert "secret" not in text and "To be" not in text
        added = read_recording(path).added
        first, second = (unpack_names(request.prompt).tolist() for request in added)
        assert [len(first), len(second)] == [len(each) for each in ids]
        assert first[:common] == second[:common]
        assert not set(first[common:]) & set(second[common:])
        assert not set(first) & {*ids[0], *ids[1]}
        assert added[0].tenant == added[1].tenant != ""
        names.append(set(first))
    assert not names[0] & names[1]


def test_a_recording_that_begins_late_says_so(bard, tmp_path):
    bard.generate("To be", SamplingParams(max_tokens=4), use_tqdm=False)
    bard.start_recording(tmp_path / "t")
    bard.generate("To be", SamplingParams(max_tokens=4), use_tqdm=False)
    bard.stop_recording()
    recording = read_recording(tmp_path / "t")
    assert not recording.header.is_cold and not recording.is_whole


def test_a_full_disk_ends_the_recording_and_not_the_engine(bard, caplog):
    """/dev/full takes nothing: the error is logged once, and requests go on."""
    bard.start_recording("/dev/full")
    for _ in range(3):
        outputs = bard.generate("To be", SamplingParams(max_tokens=8), use_tqdm=False)
        assert outputs[0].finished and outputs[0].error is None
    bard.stop_recording()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and "No space left" in errors[0] and "/dev/full" in errors[0]
    assert bard.engine.recorder.path is None


def test_a_fault_of_the_recorder_ends_the_recording_and_not_the_engine(
    bard, tmp_path, caplog, monkeypatch
):
    bard.start_recording(tmp_path / "t")
    monkeypatch.setattr("ostinato.engine.loop.recorder.trace.Steps", None)
    outputs = bard.generate("To be", SamplingParams(max_tokens=4), use_tqdm=False)
    assert outputs[0].finished and bard.engine.recorder.path is None
    assert "the recording to" in caplog.text and "the engine continues" in caplog.text


def test_a_trace_is_never_written_over(bard, tmp_path):
    (tmp_path / "t").write_text("precious")
    with pytest.raises(ConfigError, match=r"record_trace=.*exists already"):
        bard.start_recording(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"record_trace=.*No such file"):
        bard.start_recording(tmp_path / "nowhere" / "t")
    assert (tmp_path / "t").read_text() == "precious"
    bard.start_recording(tmp_path / "u")
    with pytest.raises(ConfigError, match=r"a recording to .*u' runs: stop it"):
        bard.start_recording(tmp_path / "v")
    bard.stop_recording()
    assert bard.stop_recording() is None


def test_every_line_is_json_and_the_last_one_says_that_it_was_ended_in_order(bard, tmp_path):
    bard.start_recording(tmp_path / "t")
    bard.generate("To be", SamplingParams(max_tokens=300), use_tqdm=False)
    bard.stop_recording()
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "header",
        "added",
        *["steps"] * 3,
        "ended",
        "stopped",
    ]
    assert sum(len(line.get("times_us", ())) for line in lines) == 2 * 300
    assert lines[-1]["step"] == 300


def test_the_caches_clock_runs_on_after_the_recording(make_llm, tmp_path):
    """Held between entries while it records, so that a replay can show the same times."""
    llm = make_llm("llama", num_blocks=16)
    clock = llm.engine.recorder.clock
    llm.start_recording(tmp_path / "t")
    held = clock()
    assert clock() == held
    llm.stop_recording()
    assert clock() > held

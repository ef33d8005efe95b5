"""Whatever fails or is cancelled takes nothing along and leaves nothing behind.

Faults come in the middle of a forward pass, when the first layer has written its keys and values
and the others have not: a request that found such a block later would get wrong tokens.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.engine import Engine
from ostinato.engine.prompts import Prompt
from ostinato.engine.request_state import RequestState
from ostinato.errors import CacheInUse, DuplicateRequest, RequestError, StepFailed
from ostinato.observe.introspection import cached_blocks
from tests.engine.faults import Sabotage, sabotage
from tests.support.engines import MakeLLM, assert_idle

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
STEM = list(range(30, 61))
PROMPTS = [STEM, [*STEM[:21], 5, 6, 7], [*STEM[:10], 8], list(range(90, 103)), STEM]
"""Relatives that share blocks and copy, a stranger, and a twin."""


@pytest.fixture(scope="module")
def expected(checkpoints: Any) -> list[list[int]]:
    """Serve the prompts one by one without a cache."""
    path = str(checkpoints.path("llama"))
    llm = LLM(path, dtype="float64", block_size=4, num_blocks=64, enable_prefix_caching=False)
    return [tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the ids of each request's first continuation."""
    return [output.outputs[0].token_ids for output in outputs]


def add(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **named: Any) -> str:
    """Add a request; returns its name."""
    made = engine.make_request(Prompt(token_ids=prompt), params, **named)
    engine.add(made)
    return made.request.request_id


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; returns the outputs of what ended."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_work:
        states = [state for state in engine.step() if state.finished]
        ended.update((state.request.request_id, state.output()) for state in states)
    return ended


# --- a forward pass raises ---


@pytest.mark.parametrize("step", range(9))
def test_after_a_failed_step_answers_are_exact(
    step: int, index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """Chunked prefills, copies, shared blocks and decodes: each step fails once, then all is run.

    Law 5: nothing that the failed step was to publish is found afterwards.
    """
    settings = {"max_num_batched_tokens": 17, "max_num_seqs": 4, "max_chunk_tokens": 9}
    llm = make_llm("llama", index=index, num_blocks=40, **settings)

    with sabotage(llm, step), pytest.raises(StepFailed) as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_idle(llm.engine)
    for output, tokens in zip(caught.value.outputs, expected, strict=True):
        got = output.outputs[0].token_ids
        assert got == tokens[: len(got)]
        assert output.outputs[0].finish_reason == ("error" if output.error else "length")
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("step", [0, 3, 6])
def test_under_memory_pressure_a_failed_step_leaves_no_trace_either(
    step: int, index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """A pool in which requests preempt and evict each other."""
    llm = make_llm("llama", index=index, num_blocks=12)
    for _ in range(2):
        with sabotage(llm, step), pytest.raises(StepFailed):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_idle(llm.engine)

    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert llm.engine.scheduler_stats.num_preemptions > 0


def test_only_requests_of_the_failed_step_end(
    make_llm: MakeLLM, expected: list[list[int]], caplog: pytest.LogCaptureFixture
):
    """One seat: the first runs and fails in its third step, the others come after it."""
    llm = make_llm("llama", max_num_seqs=1)

    with sabotage(llm, step=2), pytest.raises(StepFailed) as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    reason = "the forward pass failed: Sabotage: a layer gave up"
    assert str(caught.value).startswith(f"1 of 5 requests failed: {reason}; the exception's")
    first, *others = caught.value.outputs
    assert (first.error, first.finished) == (reason, True)
    assert first.outputs[0].token_ids == expected[0][:2]
    assert first.outputs[0].finish_reason == "error"
    assert tokens_of(others) == expected[1:]
    assert not any(other.error for other in others)
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == ["a step failed; its 1 sequences end"]
    assert records[0].exc_info is not None and records[0].exc_info[0] is Sabotage


def test_what_was_computed_before_the_failed_step_is_still_found(make_llm: MakeLLM):
    """31 tokens in chunks of 8: the third fails, and the first two stay: 16 tokens."""
    llm = make_llm("llama", max_chunk_tokens=8)
    with sabotage(llm, step=2), pytest.raises(StepFailed) as caught:
        llm.generate([STEM], GREEDY, use_tqdm=False)

    failed = caught.value.outputs[0]
    assert (failed.outputs[0].token_ids, failed.num_cached_tokens) == ([], 0)
    assert failed.timings.first_scheduled is not None
    assert llm.generate([STEM], GREEDY, use_tqdm=False)[0].num_cached_tokens == 16


def test_all_continuations_of_a_request_fail_together(make_llm: MakeLLM):
    """Two seats for four continuations: those that still wait end with the others."""
    llm = make_llm("llama", max_num_seqs=2)
    four = SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True)

    with sabotage(llm, step=2), pytest.raises(StepFailed) as caught:
        llm.generate([STEM], four, use_tqdm=False)

    completions = caught.value.outputs[0].outputs
    assert [completion.finish_reason for completion in completions] == ["error"] * 4
    assert [len(completion.token_ids) for completion in completions] == [2, 2, 1, 1]


def test_a_follower_takes_over_when_its_leader_fails(make_llm: MakeLLM, expected: list[list[int]]):
    """The twin waits for the leader's chunks; the leader's second one fails."""
    llm = make_llm("llama", max_chunk_tokens=8)
    engine = llm.engine
    leader, follower = add(engine, STEM), add(engine, STEM)

    with sabotage(llm, step=1):
        outputs = run(engine)

    assert outputs[leader].error is not None
    assert outputs[follower].outputs[0].token_ids == expected[0]
    assert outputs[follower].num_cached_tokens == 8


def test_an_error_behind_the_forward_pass_leaves_nothing_either(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    """A mistake of ours reaches the caller as it is, and the engine continues."""

    def give_up(*_: Any) -> None:
        raise Sabotage("no text today")

    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "take", give_up)
        with pytest.raises(Sabotage):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_idle(llm.engine)

    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


# --- Ctrl-C ---


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Let Ctrl-C raise, as in a program of its own; test runners may have changed that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_an_interrupt_in_a_forward_pass_leaves_nothing(
    step: int, index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    llm = make_llm("llama", index=index, max_num_batched_tokens=17, max_num_seqs=4)

    with sabotage(llm, step, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_idle(llm.engine)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def interrupt_within(owner: Any, name: str, call: int, patch: pytest.MonkeyPatch) -> None:
    """Make Ctrl-C come in the middle of a method, at its n-th call."""
    method, num_calls = getattr(owner, name), 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments, **named)

    patch.setattr(owner, name, interrupted)


PLACES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "while requests are added": lambda engine: (engine.scheduler, "add"),
    "before the plan": lambda engine: (engine.scheduler, "plan"),
    "in the plan": lambda engine: (engine.cache.manager, "admit"),
    "in the forward pass": lambda engine: (engine.runner, "execute"),
    "before the commit": lambda engine: (engine.scheduler, "commit"),
    "in the commit": lambda engine: (engine.cache.manager, "commit"),
    "when a request ends": lambda engine: (engine.cache.manager, "release"),
}


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_tears_nothing(
    place: str,
    call: int,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[int]],
):
    """A real signal, wherever it comes: the batch ends, and the next one is exact."""
    llm = make_llm("llama", max_num_batched_tokens=17, max_num_seqs=4)

    with monkeypatch.context() as patch:
        interrupt_within(*PLACES[place](llm.engine), call, patch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm.engine)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_does_not_wait_for_the_end_of_a_forward_pass(make_llm: MakeLLM):
    """It comes in the first of two layers; the second is not computed any more."""
    llm = make_llm("llama")
    reached: list[str] = []
    layers = llm.engine.loaded.model.model.layers
    hooks = [
        layers[0].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT)),
        layers[1].register_forward_pre_hook(lambda *_: reached.append("the second layer")),
    ]

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    for hook in hooks:
        hook.remove()
    assert reached == []
    assert_idle(llm.engine)


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_while_a_batch_is_tidied_up_waits_for_that(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
):
    """The second Ctrl-C of an impatient user comes when the first is being obeyed."""
    llm = make_llm("llama")
    with monkeypatch.context() as patch:
        interrupt_within(llm.engine.runner, "execute", 2, patch)
        interrupt_within(llm.engine.scheduler, "cancel", 1, patch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_idle(llm.engine)


@pytest.mark.usefixtures("pythons_own_handler")
def test_a_programs_own_handler_is_left_alone(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    """The handler of the signal runs at once, and decides what it means."""
    llm = make_llm("llama")
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))

    with monkeypatch.context() as patch:
        interrupt_within(llm.engine.scheduler, "plan", 2, patch)
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected

    assert seen == [signal.SIGINT]


# --- cancelling ---


def test_when_a_leader_is_cancelled_its_follower_goes_on_where_it_was(
    index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """Two chunks of 8 are computed; the follower finds them and computes the other 15 tokens."""
    llm = make_llm("llama", index=index, max_chunk_tokens=8)
    engine = llm.engine
    leader, follower = add(engine, STEM), add(engine, STEM)
    engine.step()
    engine.step()
    assert engine.scheduler.num_waiting == 1

    cut = engine.cancel(leader)
    outputs = run(engine)

    assert cut is not None
    assert (cut.finished, cut.error, cut.outputs[0].finish_reason) == (True, None, "abort")
    assert cut.outputs[0].token_ids == []
    assert list(outputs) == [follower]
    assert outputs[follower].outputs[0].token_ids == expected[0]
    assert outputs[follower].num_cached_tokens == 16
    assert engine.runner.num_tokens_computed == 31 + 5


def test_a_follower_may_leave_while_it_waits(make_llm: MakeLLM, expected: list[list[int]]):
    llm = make_llm("llama", max_chunk_tokens=8)
    engine = llm.engine
    leader, follower = add(engine, STEM), add(engine, STEM)
    engine.step()

    cut = engine.cancel(follower)
    outputs = run(engine)

    assert cut is not None and cut.timings.first_scheduled is None
    assert tokens_of(list(outputs.values())) == [expected[0]]
    assert list(outputs) == [leader]


@pytest.mark.parametrize("num_steps", range(6))
def test_a_cancelled_request_tells_what_it_brought(
    num_steps: int, make_llm: MakeLLM, expected: list[list[int]]
):
    """Before its first step, in the middle of its prompt, and while it decodes."""
    llm = make_llm("llama", max_chunk_tokens=16)
    engine = llm.engine
    name = add(engine, STEM)
    for _ in range(num_steps):
        engine.step()

    output = engine.cancel(name)

    assert output is not None
    assert output.outputs[0].token_ids == expected[0][: max(0, num_steps - 1)]
    assert output.outputs[0].finish_reason == "abort"
    assert (output.timings.first_scheduled is None) == (num_steps == 0)
    assert output.timings.finished is not None
    assert_idle(engine)


def test_all_continuations_of_a_request_are_cancelled(make_llm: MakeLLM):
    llm = make_llm("llama", max_num_seqs=2)
    engine = llm.engine
    name = add(engine, STEM, SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()

    output = engine.cancel(name)

    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 4
    assert_idle(engine)


def test_a_cancelled_request_is_not_known_any_more(llm: LLM):
    engine = llm.engine
    name = add(engine, STEM)

    assert engine.cancel(name) is not None
    assert engine.cancel(name) is None
    assert engine.cancel("nobody") is None


# --- names, and the cache in use ---


def test_a_name_is_unique_among_live_requests(llm: LLM):
    engine = llm.engine
    first = engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    second = engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    engine.add(first)

    with pytest.raises(DuplicateRequest, match="request id 'twin' is in use"):
        engine.add(second)
    with pytest.raises(DuplicateRequest, match="wait until that request has ended"):
        engine.make_request(Prompt(token_ids=STEM), GREEDY, "twin")
    run(engine)

    assert add(engine, STEM, request_id="twin") == "twin"
    run(engine)


def test_names_that_are_made_up_avoid_those_in_use(make_llm: MakeLLM):
    llm = make_llm("llama")
    engine = llm.engine
    taken = [add(engine, STEM, request_id=f"request-{number}") for number in (0, 1, 3)]

    names = [add(engine, STEM) for _ in range(2)]

    assert len({*taken, *names}) == 5
    run(engine)


@pytest.mark.parametrize("name", [5, b"x", ["x"]])
def test_a_name_is_a_text(name: Any, llm: LLM):
    with pytest.raises(RequestError, match=r"request_id=.*: must be a str"):
        llm.engine.make_request(Prompt(token_ids=STEM), GREEDY, name)


def test_a_reset_is_refused_while_requests_run_unless_they_are_preempted(
    index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    """A refused reset changes nothing; one that preempts changes no answer."""
    llm = make_llm("llama", index=index)
    engine = llm.engine
    names = [add(engine, prompt) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()

    with pytest.raises(CacheInUse, match=r"5 running sequences hold blocks: .*preempt_running"):
        engine.reset_cache()
    engine.step()
    engine.reset_cache(preempt_running=True)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 5)
    assert list(cached_blocks(engine.cache.manager.index)) == []

    outputs = run(engine)
    assert tokens_of([outputs[name] for name in names]) == expected

"""A step that fails or is interrupted leaves nothing behind, and ends no other requests.

Faults come in the middle of a forward pass, when the first layer has written its keys and values
and the others have not: a request that found such a block later would get wrong tokens.
"""

import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.request_state import RequestState
from ostinato.errors import StepFailed
from tests.engine.api.llm_calls import tokens_of
from tests.engine.loop.faults import Sabotage, sabotage
from tests.engine.relatives import GREEDY, PROMPTS, STEM, add, expected, run
from tests.support.engines import MakeLLM, assert_idle

__all__ = ["expected"]


# --- a forward pass raises ---


@pytest.mark.one_case_in(3)
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
    llm = make_llm("llama", max_num_seqs=1, order="fcfs")

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


class OutOfTime(BaseException):
    """What a program's own handler raises."""


def raise_out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


@pytest.fixture
def handlers() -> Iterator[None]:
    """Let Ctrl-C and a program's alarm raise; test runners may have changed that."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGALRM: raise_out_of_time}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_an_interrupt_in_a_forward_pass_leaves_nothing(
    step: int, index: str, make_llm: MakeLLM, expected: list[list[int]]
):
    llm = make_llm("llama", index=index, max_num_batched_tokens=17, max_num_seqs=4)

    with sabotage(llm, step, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert_idle(llm.engine)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def interrupt_within(
    owner: Any, name: str, call: int, patch: pytest.MonkeyPatch, number: int = signal.SIGINT
) -> None:
    """Make a signal come in the middle of a method, at its n-th call; by default Ctrl-C."""
    method, num_calls = getattr(owner, name), 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            signal.raise_signal(number)
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


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("call", "number", "raised"),
    [
        (1, signal.SIGINT, KeyboardInterrupt),
        (3, signal.SIGINT, KeyboardInterrupt),
        (2, signal.SIGALRM, OutOfTime),
    ],
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("handlers")
def test_an_exception_of_a_signal_handler_tears_nothing(
    place: str,
    call: int,
    number: int,
    raised: type[BaseException],
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[int]],
):
    """A real signal, wherever it comes: the batch ends, and the next one is exact."""
    llm = make_llm("llama", max_num_batched_tokens=17, max_num_seqs=4)

    with monkeypatch.context() as patch:
        interrupt_within(*PLACES[place](llm.engine), call, patch, number)
        with pytest.raises(raised):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGALRM) is raise_out_of_time
    assert_idle(llm.engine)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.usefixtures("handlers")
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


@pytest.mark.usefixtures("handlers")
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


@pytest.mark.usefixtures("handlers")
def test_a_programs_own_handler_is_called(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    """The handler of the signal runs between two steps, and decides what it means."""
    llm = make_llm("llama")
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))

    with monkeypatch.context() as patch:
        interrupt_within(llm.engine.scheduler, "plan", 2, patch)
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected

    assert seen == [signal.SIGINT]

"""Outputs are complete, and do not change after they are returned."""

import dataclasses

import pytest

from ostinato.engine.requests.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestTimings,
)


def test_the_durations_of_a_finished_request_add_up():
    """Waiting, prefill and decode are all of its time."""
    timings = RequestTimings(arrival=10.0, first_scheduled=11.0, first_token=13.0, finished=20.0)

    assert timings.queue_time == 1.0
    assert timings.prefill_time == 2.0
    assert timings.time_to_first_token == 3.0
    assert timings.decode_time == 7.0
    assert timings.total_time == 10.0


def test_what_has_not_happened_has_no_duration():
    """A moment of zero did happen: clocks may start there."""
    waiting = RequestTimings(arrival=0.0)
    running = RequestTimings(arrival=0.0, first_scheduled=0.0, first_token=0.5)

    assert waiting.queue_time is waiting.time_to_first_token is waiting.total_time is None
    assert (running.queue_time, running.prefill_time, running.decode_time) == (0.0, 0.5, None)


def test_a_request_that_failed_in_the_queue_still_tells_how_long_it_took():
    timings = RequestTimings(arrival=1.0, finished=4.0)

    assert timings.total_time == 3.0
    assert timings.time_to_first_token is None


def test_a_completion_is_finished_when_it_has_a_reason():
    assert not CompletionOutput(index=0, text="a", token_ids=[1]).finished
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length").finished


def test_outputs_of_the_same_content_are_equal_and_cannot_be_changed():
    """A stream hands out one after the other; an earlier one must not turn into a later."""

    def output() -> RequestOutput:
        logprobs = [{1: Logprob(-0.5, 1, "a")}]
        completion = CompletionOutput(0, "a", [1], logprobs=logprobs, cumulative_logprob=-0.5)
        return RequestOutput("r", "p", [7], [completion], False, RequestTimings(1.0))

    assert output() == output()
    for value in (output(), output().outputs[0], output().timings, Logprob(-1.0, 2)):
        field = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)
        assert not hasattr(value, "__dict__")


def test_the_fields_have_the_names_that_programs_for_vllm_read():
    request = {field.name for field in dataclasses.fields(RequestOutput)}
    completion = {field.name for field in dataclasses.fields(CompletionOutput)}
    logprob = {field.name for field in dataclasses.fields(Logprob)}

    assert request >= {
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished",
        "num_cached_tokens",
    }  # fmt: skip
    assert completion >= {
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason",
        "stop_reason",
    }  # fmt: skip
    assert logprob == {"logprob", "rank", "decoded_token"}

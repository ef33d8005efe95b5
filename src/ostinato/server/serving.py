"""Runs completions: limits, leases, observers.

One function for all APIs: bounds the queue, enforces the caller's limits, runs the request, leases
its prompt on request, and notifies observers::

    route ─► serve ─► hold_places ─► AsyncLLM.generate ─► (lease) ─► outputs
                          └── 429, 503      └── 400          └── 500, 503
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, nullcontext

from ostinato.core.request import FinishReason
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.errors import InvalidSamplingParams, StepFailed
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError, api_error, stopping
from ostinato.server.held_prefixes import hold_all
from ostinato.server.state import ServerState
from ostinato.server.telemetry.observer import ServedRequest


@contextmanager
def hold_places(
    state: ServerState, caller: Caller, call: GenerateCall, num_calls: int = 1
) -> Iterator[None]:
    """Admit ``num_calls`` calls together: their continuations count as running inside the block.

    Raises:
        ApiError: There is no room for all of them now (429) or ever (400), a priority is refused
            (400), or the server is draining (503).
    """
    try:
        num_sequences = _require_room(state, caller, call, num_calls)
        caller.check_priority(call.priority)
        state.rate_limit.enter(caller, num_sequences)
    except ApiError as error:
        _note_refusal(state, caller, call, error)
        raise
    try:
        yield
    finally:
        state.rate_limit.leave(caller, num_sequences)


async def serve(
    state: ServerState, caller: Caller, call: GenerateCall, is_held: bool = False
) -> AsyncGenerator[RequestOutput, None]:
    """Continue one prompt for a caller, and yield cumulative outputs.

    Args:
        state: Server state.
        caller: Its sender.
        call: The prompt and its parameters.
        is_held: Whether its place is held already, by ``hold_places``.

    Raises:
        ApiError: It was refused, or failed, perhaps after some outputs.

    Effects: closing the generator early cancels the request and frees its blocks.
    """
    with nullcontext() if is_held else hold_places(state, caller, call):
        prompt, priority = call.prompt, caller.priority + call.priority
        record = ServedRequest(call.request_id, call, caller, prompt.cache_salt, time.monotonic())
        try:
            for observer in state.observers:
                observer.accepted(record)
            request_id = call.request_id
            async with aclosing(
                state.llm.generate(prompt, call.params, request_id=request_id, priority=priority)
            ) as outputs:
                async for output in outputs:
                    is_first = record.note(output, time.monotonic())
                    _raise_if_failed(output)
                    if is_first:
                        await _begin(state, record, output)
                    yield output
        except Exception as error:
            record.error = api_error(error)
            raise record.error from error
        finally:
            finished = record.output is not None and record.output.finished
            record.is_gone = record.error is None and not finished
            state.rate_limit.charge(caller, record.num_generated)
            for observer in state.observers:
                observer.finished(record)


async def last_output(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """Run a call to its end, and return its last output.

    Raises:
        ApiError: It was refused, or failed.
    """
    last: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            last = output
    assert last is not None, "a request ended without an output"
    return last


def check_room(state: ServerState, caller: Caller, call: GenerateCall, num_calls: int = 1) -> None:
    """Refuse calls that do not fit together, before any of them starts.

    Raises:
        ApiError: There is no room now (429) or ever (400), or the server is draining (503).
    """
    try:
        _require_room(state, caller, call, num_calls)
    except ApiError as error:
        _note_refusal(state, caller, call, error)
        raise


def _require_room(state: ServerState, caller: Caller, call: GenerateCall, num_calls: int) -> int:
    """Return how many continuations calls with these parameters have."""
    config, max_per_prompt = state.config, call.params.num_sequences
    num_sequences = max_per_prompt * num_calls
    if state.is_draining:
        raise stopping("the server is shutting down: send the request to another one")
    if max_per_prompt > config.max_n:
        raise _too_many("n", max_per_prompt, config.max_n, "--max-n")
    if num_sequences > config.max_requests:
        raise _too_many("prompts times n", num_sequences, config.max_requests, "--max-requests")
    if state.rate_limit.num_live + num_sequences > config.max_requests:
        raise _full("the server is at capacity", "queue_full")
    if not state.rate_limit.has_room(caller, num_sequences, config.max_requests, config.key_share):
        if num_sequences > config.max_requests * config.key_share:
            key_limit = int(config.max_requests * config.key_share)
            raise _too_many("prompts times n", num_sequences, key_limit, "--key-share")
        raise _full(
            f"this key has its share (--key-share {config.key_share:g}) of the "
            f"{config.max_requests} continuations of this server",
            "key_share",
        )
    return num_sequences


def _full(reason: str, code: str) -> ApiError:
    """Return the error for a call that has no room now."""
    return ApiError(
        429,
        f"{reason}: retry after 1 s",
        code=code,
        headers={"Retry-After": "1"},
    )


def _too_many(name: str, value: int, limit: int, option: str) -> ApiError:
    """Return the error for a call that can never fit."""
    return ApiError(
        400,
        f"{name}={value}: at most {limit} on this server; ask for fewer, or raise {option}",
        param="n",
        code="too_many_continuations",
    )


def _note_refusal(state: ServerState, caller: Caller, call: GenerateCall, error: ApiError) -> None:
    for observer in state.observers:
        observer.refused(caller, call, error)


async def _begin(state: ServerState, record: ServedRequest, output: RequestOutput) -> None:
    """Lease a prompt once it is computed, charge for it, and notify observers."""
    call, held = record.call, state.held_prefixes
    if call.kept:
        call.leased.extend(await hold_all(held, call.prompt, call.kept, output))
        call.num_retained_tokens.append(max([length for _, length in call.leased], default=0))
    if call.retention is not None:  # repeated requests share one lease
        record.lease = await held.hold(
            call.prompt, output.prompt_token_ids, call.retention, output.num_cached_tokens
        )
        call.num_retained_tokens[:] = [record.lease.num_tokens]  # it covers those of marks
    state.rate_limit.charge(record.caller, len(output.prompt_token_ids))
    for observer in state.observers:
        observer.first_token(record)


def _raise_if_failed(output: RequestOutput) -> None:
    """Raise the error of a failed request.

    Raises:
        InvalidSamplingParams: Its parameters left no token to sample.
        StepFailed: Its forward pass failed.
        ApiError: It was cancelled, though not by its client.
    """
    if output.error is not None:
        raise (InvalidSamplingParams if output.has_own_error else StepFailed)(output.error)
    if output.finished and FinishReason.ABORT in [p.finish_reason for p in output.outputs]:
        raise ApiError(
            503,
            "the request was cancelled: the server shuts down, or its tenant is being erased",
            code="cancelled",
        )

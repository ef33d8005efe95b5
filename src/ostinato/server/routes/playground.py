"""The page's playground: origins of a prompt's tokens, and savings of shared prefixes.

It runs a prompt like any completion, and returns for each token whether it was cached, copied or
computed. Savings are computed by the lab.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.lab.simulate.savings import Workload, as_figures
from ostinato.protocol.body import Body
from ostinato.server.access.callers import CallerDep
from ostinato.server.call import GenerateCall, sender
from ostinato.server.serving import last_output, serve
from ostinato.server.state import StateDep
from ostinato.server.streaming import until_gone

router = APIRouter(include_in_schema=False)

ENDPOINT = "/ui/play"

MAX_LETTERS = 20_000
"""Longest prompt of the playground: each token becomes an element of the page."""


class PlayBody(Body):
    """A prompt for the playground."""

    prompt: str = Field(min_length=1, max_length=MAX_LETTERS)
    max_tokens: int = Field(default=32, ge=1, le=256)
    write: bool = True


@router.post(ENDPOINT)
async def play(
    body: PlayBody, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, Any]:
    """Continue a prompt greedily, and return the origin of each of its tokens."""
    call = GenerateCall(
        endpoint=ENDPOINT,
        params=SamplingParams(max_tokens=body.max_tokens, temperature=0),
        prompt=sender(caller, text=body.prompt, cache_write=body.write),
    )
    output = await until_gone(request, last_output(serve(state, caller, call)))
    pieces = await state.llm.tokenizing.pieces(output.prompt_token_ids)
    return {
        "id": call.request_id,
        "tokens": list(zip(pieces, origins(output), strict=True)),
        "block_size": state.llm.engine.cache.config.block_size,
        "text": output.outputs[0].text,
        "finish_reason": output.outputs[0].finish_reason,
        "first_token_s": output.timings.time_to_first_token,
    }


def origins(output: RequestOutput) -> list[str]:
    """Return whether each prompt token was cached, copied or computed; in this order."""
    hit, copied = output.num_cached_tokens, output.num_copied_tokens
    computed = len(output.prompt_token_ids) - hit
    return ["cached"] * (hit - copied) + ["copied"] * copied + ["computed"] * computed


Count = Annotated[int, Query(ge=0, le=10**9)]


@router.get("/ui/savings")
async def savings(
    caller: CallerDep,
    shared: Count,
    suffix: Count,
    requests: Annotated[int, Query(ge=1, le=10**9)],
    block_size: Annotated[int, Query(ge=1, le=10**6)] = 16,
) -> dict[str, object]:
    """Return what a shared prefix saves, as ``ostinato savings --json`` does.

    Raises:
        ConfigError: The prompts are empty.
    """
    return as_figures(Workload(shared, suffix, requests, block_size))

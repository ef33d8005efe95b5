"""Computes prefixes ahead of requests."""

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from ostinato.core.errors import ConfigError, OstinatoError
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.server.access.callers import NO_LIMITS
from ostinato.server.admin.bodies import PrefixBody, PrewarmLine
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.serving import last_output, serve
from ostinato.server.state import ServerState
from ostinato.tenants.terms import LeaseStatus

ENDPOINT = "/admin/prewarm"


async def prewarm(state: ServerState, body: PrefixBody) -> dict[str, int]:
    """Compute a prompt for its tenant, whatever the tenant's limits.

    Returns:
        Its tokens, and how many of them had to be computed.

    Raises:
        ApiError: There is no such tenant, or the prompt can never be served.
    """
    caller = replace(state.callers.named(body.tenant), limits=NO_LIMITS)
    call = GenerateCall(
        endpoint=ENDPOINT,
        params=SamplingParams(max_tokens=1, detokenize=False),
        prompt=await body.as_prompt(state),
    )
    last = await last_output(serve(state, caller, call))
    num_tokens, cached = len(last.prompt_token_ids), last.num_cached_tokens
    return {
        "num_tokens": num_tokens,
        "num_cached_tokens": cached,
        "num_computed_tokens": num_tokens - cached,
    }


def read_prewarm_file(path: str | Path) -> list[PrewarmLine]:
    """Read prompts, one JSON object per line; empty lines are skipped.

    Raises:
        ConfigError: The file cannot be read, or a line is invalid; the message says which.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prewarm file {str(path)!r} cannot be read: {error}") from error
    prewarmed = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prewarmed.append(PrewarmLine.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the object"
            reason = first["msg"].removeprefix("Value error, ")
            raise ConfigError(
                f"prewarm file {str(path)!r}, line {number}: {place}: {reason}"
            ) from error
    return prewarmed


async def prewarm_all(state: ServerState, lines: list[PrewarmLine]) -> int:
    """Compute prompts in order, and publish or lease them as their lines say.

    Returns:
        The number of tokens of all of them.

    Raises:
        ConfigError: One of them cannot be served or kept; the message says which and why.
    """
    num_tokens = 0
    for number, line in enumerate(lines, 1):
        try:
            num_tokens += await _prewarm_one(state, line)
        except (ApiError, OstinatoError) as error:
            raise ConfigError(f"prompt {number} of the prewarm file: {error}") from error
    return num_tokens


async def _prewarm_one(state: ServerState, line: PrewarmLine) -> int:
    if line.publish is not None:
        receipt = await state.llm.publish(line.publish, await line.prompt_of(state, Prompt()))
    else:
        num_tokens = (await prewarm(state, line))["num_tokens"]
        if not line.pin and line.ttl_s is None:
            return num_tokens
        receipt = await state.llm.lease(await line.as_prompt(state), line.terms())
    if receipt.status is LeaseStatus.REJECTED:
        raise ApiError(409, f"it is computed, but not kept: {receipt.reason}")
    return receipt.num_tokens

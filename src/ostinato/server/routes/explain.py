"""``/v1/explain``: why a request's prompt missed.

By the id of the response, for the tenant that sent the request. Tenants learn nothing about the
requests of others, not even that there were any; administrators also see matches across tenants.
"""

import asyncio
from typing import Any

from fastapi import APIRouter

from ostinato.core.errors import RequestError
from ostinato.observe.explanation import Explanation
from ostinato.plugins.explainer import Explainer, read_prompt
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState, StateDep

router = APIRouter(tags=["explanations"])


@router.get("/v1/explain/{response_id}")
async def explain(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Explain for every token of a prompt whether it hit, and why it missed."""
    explanation = await _explanation(state, caller, response_id)
    answer = {
        "object": "explanation",
        "id": response_id,
        **explanation.as_dict(),
        "text": str(explanation),
    }
    if state.explainer is not None and caller.may_administer:
        answer["own"] = await _own(state, state.explainer, explanation.request_id)
    return answer


async def _own(state: ServerState, explainer: Explainer, name: str) -> dict[str, Any] | None:
    """Return the explanation of a function of one's own; None if nothing is remembered."""
    prompt = await state.llm.look(lambda engine: read_prompt(engine.cache.history, name))
    return None if prompt is None else await asyncio.to_thread(explainer.spans, prompt)


async def _explanation(state: ServerState, caller: Caller, response_id: str) -> Explanation:
    """Ask the engine for an explanation.

    Raises:
        ApiError: The caller sent no such request, or it is no longer remembered (404).
    """
    errors: list[RequestError] = []
    for name in (response_id, f"{response_id}-0"):  # of several prompts the first
        try:
            return await state.llm.explain(
                name, administrator=caller.may_administer, cache_salt=caller.salt or None
            )
        except RequestError as error:
            errors.append(error)
    unknown = errors[0]
    raise ApiError(404, str(unknown), param="response_id", code="not_found") from unknown

"""Public prefixes: shared by tenants; what follows one belongs to each tenant alone."""

from typing import Any

from fastapi import APIRouter, Request

from ostinato.engine.engine import Engine
from ostinato.engine.prompts import PromptDict
from ostinato.engine.public_prefixes import PublishedPrefix
from ostinato.server.admin.bodies import PrefixBody, UnpublishBody
from ostinato.server.callers import Administrator
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState
from ostinato.tenants.terms import LeaseStatus

router = APIRouter(prefix="/admin", tags=["administration"])


@router.put("/public/{name}")
async def publish(
    name: str, body: PrefixBody, request: Request, administrator: Administrator
) -> dict[str, Any]:
    """Compute and publish a prefix for all tenants that may read it.

    Raises:
        ApiError: It cannot be held in full (409); then no part of it is.
    """
    state: ServerState = request.app.state.server
    if body.tenant or body.cache_salt:
        raise ApiError(
            400, "a public prefix has no owner: leave out tenant and cache_salt", param="tenant"
        )
    prompt = PromptDict(prompt_token_ids=await body.token_ids(state))
    receipt = await state.llm.publish(name, prompt)
    if receipt.status is not LeaseStatus.ACCEPTED:
        raise ApiError(409, f"it is not published: {receipt.reason}", code="does_not_fit")
    return {"name": name, "num_tokens": receipt.num_tokens}


@router.get("/public")
async def list_public(request: Request, administrator: Administrator) -> dict[str, Any]:
    """List public prefixes; one that is not held was ended by a reset or by new weights."""
    state: ServerState = request.app.state.server

    def look(engine: Engine) -> list[PublishedPrefix]:
        return engine.public_prefixes.listed()

    return {
        "public": [
            {"name": known.name, "num_tokens": len(known.tokens), "is_held": known.is_held}
            for known in await state.llm.look(look)
        ]
    }


@router.post("/public/{name}/unpublish")
async def unpublish(
    name: str, body: UnpublishBody, request: Request, administrator: Administrator
) -> dict[str, int]:
    """Unpublish a prefix, and evict what tenants computed after it."""
    state: ServerState = request.app.state.server
    receipt = await state.llm.unpublish(name, body.cancel_running)
    return {"num_requests": receipt.num_requests, "num_blocks": receipt.num_blocks}

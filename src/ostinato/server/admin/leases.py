"""Leases, pins and public prefixes; what follows a public prefix belongs to each tenant alone."""

import time
from typing import Any

from fastapi import APIRouter

from ostinato.engine.prompts.public_prefixes import public_name
from ostinato.engine.requests.prompts import Prompt
from ostinato.server.access.callers import ADMIN_ONLY
from ostinato.server.admin.bodies import LeaseBody, PrefixBody, UnpublishBody
from ostinato.server.admin.prewarming import prewarm
from ostinato.server.admin.statistics import name_of
from ostinato.server.errors import ApiError, unknown_name
from ostinato.server.state import StateDep
from ostinato.tenants.terms import LeaseId, LeaseStatus

router = APIRouter(prefix="/admin", tags=["administration"], dependencies=ADMIN_ONLY)


@router.post("/prewarm")
async def prewarm_prompt(body: PrefixBody, state: StateDep) -> dict[str, int]:
    """Compute a prompt, so that the first request with it hits."""
    return await prewarm(state, body)


@router.post("/leases")
async def open_lease(body: LeaseBody, state: StateDep) -> dict[str, Any]:
    """Lease the cached part of a prefix; the receipt says how much that is, and why."""
    receipt = await state.llm.lease(await body.as_prompt(state), body.terms())
    return {
        "status": str(receipt.status),
        "reason": receipt.reason,
        "lease_id": receipt.lease_id,
        "num_tokens": receipt.num_tokens,
        "expires_in_s": None if receipt.lease_id is None else body.ttl_s,
    }


@router.get("/leases")
async def list_leases(state: StateDep) -> dict[str, Any]:
    """List leases; public prefixes are listed under ``/admin/public``."""
    now_s = time.monotonic()
    leases = [
        {
            "lease_id": lease.lease_id,
            "tenant": name_of(state, lease.table.tenant),
            "num_tokens": lease.table.num_computed,
            "expires_in_s": None if lease.expires_s is None else round(lease.expires_s - now_s, 3),
            "refresh_on_hit": lease.terms.refresh_on_hit,
        }
        for lease in await state.llm.look(lambda engine: engine.cache.admin.leases())
        if public_name(lease.table.tenant) is None
    ]
    return {"leases": leases}


@router.delete("/leases/{lease_id}")
async def end_lease(lease_id: int, state: StateDep) -> dict[str, bool]:
    """Release a lease.

    Raises:
        ApiError: There is no such lease, or it has expired (404).
    """
    if not await state.llm.end_lease(LeaseId(lease_id)):
        reason = "there is no such lease; it may have expired"
        raise unknown_name("lease_id", lease_id, reason, "lease_not_found")
    return {"released": True}


@router.put("/public/{name}")
async def publish(name: str, body: PrefixBody, state: StateDep) -> dict[str, Any]:
    """Compute and publish a prefix for all tenants that may read it.

    Raises:
        ApiError: It cannot be held in full (409); then no part of it is.
    """
    if body.tenant or body.cache_salt:
        raise ApiError(
            400, "a public prefix has no owner: leave out tenant and cache_salt", param="tenant"
        )
    receipt = await state.llm.publish(name, await body.prompt_of(state, Prompt()))
    if receipt.status is not LeaseStatus.ACCEPTED:
        raise ApiError(409, f"it is not published: {receipt.reason}", code="does_not_fit")
    return {"name": name, "num_tokens": receipt.num_tokens}


@router.get("/public")
async def list_public(state: StateDep) -> dict[str, Any]:
    """List public prefixes; one that is not held was ended by a reset or by new weights."""
    listed = await state.llm.look(lambda engine: engine.public_prefixes.listed())
    return {
        "public": [
            {"name": known.name, "num_tokens": len(known.tokens), "is_held": known.is_held}
            for known in listed
        ]
    }


@router.post("/public/{name}/unpublish")
async def unpublish(name: str, body: UnpublishBody, state: StateDep) -> dict[str, int]:
    """Unpublish a prefix, and evict what tenants computed after it."""
    receipt = await state.llm.unpublish(name, body.cancel_running)
    return {"num_requests": receipt.num_requests, "num_blocks": receipt.num_blocks}

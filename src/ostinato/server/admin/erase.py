"""Erases tenants."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ostinato.core.identity import derive_salt
from ostinato.server.access.callers import ADMIN_ONLY, KeyedCallers
from ostinato.server.admin.bodies import EraseBody, ResetBody
from ostinato.server.errors import ApiError
from ostinato.server.state import StateDep
from ostinato.server.telemetry.observer import salt_label

router = APIRouter(prefix="/admin", tags=["administration"], dependencies=ADMIN_ONLY)


@router.post("/reset")
async def reset(body: ResetBody, state: StateDep) -> dict[str, bool]:
    """Evict all cached prefixes of all tenants; leases and publications end."""
    await state.llm.reset_prefix_cache(body.preempt_running)
    return {"reset": True}


@router.post("/erase")
async def erase(body: EraseBody, request: Request, state: StateDep) -> dict[str, Any]:
    """Erase a tenant, and return what was erased where.

    With a client's salt only that salt is erased; without one, all data of the tenant, those of
    observers included.
    """
    caller = state.callers.named(body.tenant)
    salt = derive_salt(caller.salt, body.cache_salt)
    num_responses = state.responses.erase(salt)  # a tier may take long
    receipt = await state.llm.erase(salt, body.cancel_running)
    state.held_prefixes.erase(salt)  # their leases have ended
    num_responses += state.responses.erase(salt)  # of requests that ended meanwhile
    request.app.state.views.clear()
    noted: list[str] = []
    if not body.cache_salt or not caller.salt:
        # Without keys, observers know tenants by a label of the salt that they chose.
        name = caller.tenant or salt_label(body.cache_salt)
        state.rate_limit.remove(caller.tenant)
        noted = [
            type(observer).__module__.rpartition(".")[2]
            for observer in state.observers
            if observer.erase(name)
        ]
    return {**asdict(receipt), "num_responses": num_responses, "noted_by": noted}


@router.post("/keys/reload")
async def reload_keys(state: StateDep) -> dict[str, int]:
    """Reload the keys file: from now on its keys are valid, and no others."""
    if not isinstance(state.callers, KeyedCallers):
        raise ApiError(409, "this server was started without a keys file: there is nothing to read")
    state.callers.reload()
    return {"num_tenants": len(state.callers.keys.tenants)}

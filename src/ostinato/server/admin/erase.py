"""Erases tenants."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ostinato.server.admin.bodies import EraseBody, ResetBody
from ostinato.server.callers import Administrator, KeyedCallers
from ostinato.server.errors import ApiError
from ostinato.server.observer import ForgetsTenants
from ostinato.server.state import ServerState
from ostinato.server.tenant_usage import salt_label

router = APIRouter(prefix="/admin", tags=["administration"])


@router.post("/reset")
async def reset(body: ResetBody, request: Request, administrator: Administrator) -> dict[str, bool]:
    """Forget every cached prefix of everybody; leases and publications end."""
    state: ServerState = request.app.state.server
    await state.llm.reset_prefix_cache(body.preempt_running)
    return {"reset": True}


@router.post("/erase")
async def erase(body: EraseBody, request: Request, administrator: Administrator) -> dict[str, Any]:
    """Leave nothing of a tenant, and say what was erased, by place.

    A salt that its client narrowed it by is erased alone; without one, all of the tenant goes,
    and what observers noted of it.
    """
    state: ServerState = request.app.state.server
    caller = body.caller(state.callers)
    salt = caller.narrow(body.cache_salt)
    receipt = await state.llm.erase(salt, body.cancel_running)
    state.held_prefixes.forget(salt)  # their leases have ended
    num_responses = state.responses.forget(salt)
    noted: list[str] = []
    if not body.cache_salt or not caller.salt:
        # Where there are no keys, observers know tenants by a label of the salt that they chose.
        name = caller.tenant or salt_label(body.cache_salt)
        state.rate_limit.forget(caller.tenant)
        noted = [
            type(observer).__module__.rpartition(".")[2]
            for observer in state.observers
            if isinstance(observer, ForgetsTenants) and observer.forget(name)
        ]
    return {**asdict(receipt), "num_responses": num_responses, "noted_by": noted}


@router.post("/keys/reload")
async def reload_keys(request: Request, administrator: Administrator) -> dict[str, int]:
    """Read the keys file again: new keys are known and old ones are not, from now on."""
    state: ServerState = request.app.state.server
    if not isinstance(state.callers, KeyedCallers):
        raise ApiError(409, "this server was started without a keys file: there is nothing to read")
    state.callers.reload()
    return {"num_tenants": len(state.callers.keys.tenants)}

"""Counters and contents of the cache."""

from asyncio import to_thread
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Query

from ostinato.core.identity import Identity, tenant_of
from ostinato.engine.loop.engine import Engine
from ostinato.engine.loop.snapshot import take_snapshot
from ostinato.engine.prompts.public_prefixes import public_name
from ostinato.observe.introspection import CachedPrefix, top_prefixes
from ostinato.server.access.callers import ADMIN_ONLY
from ostinato.server.state import ServerState, StateDep
from ostinato.server.telemetry.engine_figures import FIGURES, GROUPS, lookup_counts
from ostinato.server.telemetry.figures import shown

router = APIRouter(prefix="/admin", tags=["administration"], dependencies=ADMIN_ONLY)

MAX_PREFIXES = 1000
"""Most prefixes in one response."""


@router.get("/stats")
async def statistics(state: StateDep) -> dict[str, Any]:
    """Return counters since the start, in total and per tenant."""
    seen = await state.llm.look(take_snapshot)
    texts = state.llm.engine.texts
    text_bytes = {} if texts is None else texts.known.num_bytes_by_tenant()
    tenants = {
        name_of(state, salt): {**lookup_counts(counts), "text_bytes": text_bytes.get(salt, 0)}
        for salt, counts in seen.cache.tenants.items()
    }
    template = state.llm.engine.template
    return {
        **shown((*FIGURES, *GROUPS), "admin", seen),
        "text_bytes": sum(text_bytes.values()),
        "template": None if template is None else template.as_dict(),
        "tenants": tenants,
    }


@router.get("/steps")
async def steps(state: StateDep) -> dict[str, Any]:
    """Return the learned prices of a step, and predicted and measured times."""
    seen = (await state.llm.look(take_snapshot)).steps
    return {"order": state.llm.engine.config.order, **asdict(seen)}


@router.get("/audit")
async def audits(state: StateDep) -> dict[str, Any]:
    """Return the results of audits of hits."""
    counts = (await state.llm.look(take_snapshot)).audit
    return {"share": state.llm.engine.config.audit_share, **asdict(counts)}


@router.get("/tiers")
async def tiers(state: StateDep) -> dict[str, Any]:
    """Return the tiers: their contents, loads and stores."""
    counts, cache = (await state.llm.look(take_snapshot)).tiers, state.llm.engine.tiers
    if counts is None or cache is None:
        return {"tiers": []}
    return replace(counts, tiers=await to_thread(cache.read_stats)).as_dict()


@router.get("/heaviest")
async def heaviest_prefixes(
    state: StateDep,
    max_rows: int = Query(
        default=20, ge=1, le=MAX_PREFIXES, alias="most", description="Maximum number."
    ),
    tenant: str | None = Query(default=None, description="Only of this tenant."),
) -> dict[str, Any]:
    """List the prefixes that saved the most tokens."""
    salt = None if tenant is None else state.callers.named(tenant).salt.encode()

    def belongs(identity: Identity) -> bool:
        return salt is None or identity.owner == salt

    def look(engine: Engine) -> list[CachedPrefix]:
        return top_prefixes(engine.cache.manager, engine.cache.hits, max_rows, belongs)

    return {"prefixes": [await _described(state, one) for one in await state.llm.look(look)]}


async def _described(state: ServerState, prefix: CachedPrefix) -> dict[str, Any]:
    salt, root = prefix.identity.tenant, prefix.identity.root.tenant
    public = public_name(salt)
    return {
        "tenant": None if public is not None else name_of(state, salt),
        "public": public,
        "behind": None if root == salt else public_name(root),
        "head": await _text(state, prefix.head.tolist()),
        "branch": await _text(state, prefix.branch.tolist()),
        "num_tokens": prefix.num_tokens,
        "own_tokens": prefix.own_tokens,
        "own_blocks": prefix.own_blocks,
        "num_hits": prefix.num_hits,
        "saved_tokens": prefix.saved_tokens,
        "num_holders": prefix.num_holders,
        "age_s": round(prefix.age_s, 3),
    }


def name_of(state: ServerState, salt: bytes) -> str:
    """Return a tenant's name; without keys, the salt that clients chose."""
    if (public := public_name(salt)) is not None:
        return f"public {public}"
    known = state.callers.name_of(tenant_of(salt).decode(errors="replace"))
    return known or state.usage.name_of(salt)


async def _text(state: ServerState, token_ids: list[int]) -> str | list[int]:
    """Return tokens as text, or as ids if the model has no tokenizer."""
    if state.llm.engine.loaded.tokenizer is None:
        return token_ids
    return await state.llm.decode(token_ids)

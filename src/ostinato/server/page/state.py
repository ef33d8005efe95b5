"""The data of the page, per caller.

The administrator sees all tenants; other callers see only their own usage, blocks and prefixes, and
not even the size of the pool, which would reveal the load of others.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, FastAPI, Request, Response

import ostinato
from ostinato.core.identity import Identity
from ostinato.engine.api.async_llm import AsyncLLM
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.public_prefixes import public_name
from ostinato.engine.settings.config import EngineConfig
from ostinato.labs.side_by_side import compare, served_requests
from ostinato.observe.introspection import (
    BlockMap,
    BlockState,
    CachedPrefix,
    map_blocks,
    top_prefixes,
)
from ostinato.plugins.arrivals import Arrival, arrivals_of
from ostinato.plugins.loading import is_plugin
from ostinato.server.access.callers import Caller, CallerDep
from ostinato.server.page.figures import (
    SHOWN_STATES,
    LoadHistory,
    ended_requests,
    first_tokens,
    generated,
    history,
    recent,
    token_counts,
    totals,
)
from ostinato.server.state import ServerState, StateDep
from ostinato.server.telemetry.engine_figures import FIGURES, GROUPS
from ostinato.server.telemetry.engine_watch import EngineWatch
from ostinato.server.telemetry.figures import shown
from ostinato.server.telemetry.tenant_usage import TenantCounters, merge

router = APIRouter(include_in_schema=False)

MAX_PREFIXES = 14
"""Prefixes in the list."""

MAX_CELLS = 4096
"""Largest pool whose blocks the map shows one by one."""

MANY_CELLS = 1024
"""Most cells of a larger pool's map; each shows the states of several blocks."""

MAX_WATCHES = 64
"""Most callers whose view of the cache is remembered."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A view of the cache.

    Attributes:
        blocks: The map of all blocks.
        prefixes: The top prefixes that the caller may see.
    """

    blocks: BlockMap
    prefixes: list[CachedPrefix]


class CacheViews:
    """The last view of the cache for each caller; callers with equal rights share one."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Start without views."""
        self._llm = llm
        self._watches: dict[str, EngineWatch[Seen]] = {}

    async def look(self, caller: Caller) -> Seen:
        """Return the newest view that is available soon."""
        name = "" if caller.may_administer else caller.salt
        if name not in self._watches:
            if len(self._watches) >= MAX_WATCHES:
                self._watches.pop(next(iter(self._watches)))
            self._watches[name] = EngineWatch(self._llm, partial(_view, caller))
        return await self._watches[name].look()

    def clear(self) -> None:
        """Remove all views, since any may show an erased prefix."""
        self._watches.clear()


def _view(caller: Caller, engine: Engine) -> Seen:
    def belongs(identity: Identity) -> bool:
        return caller.may_administer or identity.owner == caller.salt.encode()

    manager = engine.cache.manager
    return Seen(
        map_blocks(manager), top_prefixes(manager, engine.cache.hits, MAX_PREFIXES, belongs)
    )


def install(app: FastAPI, state: ServerState) -> None:
    """Add the observers that the page needs to an application."""
    app.state.views = CacheViews(state.llm)
    app.state.load_history = LoadHistory(state.snapshots.look)
    app.state.comparison = Comparison(state.llm)
    state.observers.append(app.state.load_history)


@router.get("/ui/state")
async def page_state(
    request: Request, state: StateDep, response: Response, caller: CallerDep
) -> dict[str, Any]:
    """Return the page's data for one caller."""
    response.headers["Cache-Control"] = "no-store"
    views: CacheViews = request.app.state.views
    seen = await views.look(caller)
    snapshot = await state.snapshots.look()
    state.usage.catch_up()
    accounts, now_s = state.usage.accounts, state.usage.now_s()
    load_history: LoadHistory = request.app.state.load_history
    load_history.note(snapshot)
    if not caller.may_administer:
        accounts = {name: of for name, of in accounts.items() if name == caller.tenant}
    account = merge(accounts.values())
    return {
        "model": state.config.model_names[0],
        "version": ostinato.__version__,
        "tenant": caller.tenant,
        "administrator": caller.may_administer,
        "block_size": state.llm.engine.cache.config.block_size,
        "totals": totals(account),
        "last_minute": token_counts(recent(account, now_s, 60)),
        "first_token": first_tokens(account.first_tokens, now_s),
        "history": history(account, now_s),
        "generated": generated(account, now_s),
        "requests": ended_requests(account, now_s),
        "tenants": _tenants(accounts) if caller.may_administer else [],
        "load": {"live": state.num_live} | shown((*FIGURES, *GROUPS), "page", snapshot)
        if caller.may_administer
        else None,
        "load_history": load_history.rows() if caller.may_administer else [],
        "blocks": lay_out_blocks(state, seen.blocks, caller),
        "prefixes": await _prefixes(state, seen.prefixes),
        "plugged": await _plugged(request, caller),
    }


async def _plugged(request: Request, caller: Caller) -> dict[str, Any] | None:
    """Return what plug-ins found beside what built-in parts find; None without plug-ins."""
    comparison: Comparison = request.app.state.comparison
    return await comparison.look() if caller.may_administer else None


def _tenants(accounts: dict[str, TenantCounters]) -> list[dict[str, Any]]:
    """List tenants, most prompt tokens first."""
    ordered = sorted(accounts.items(), key=lambda item: -item[1].prompt.total)
    return [
        {"name": name, "requests": account.num_requests} | token_counts(account.prompt)
        for name, account in ordered[:MAX_PREFIXES]
    ]


def lay_out_blocks(state: ServerState, drawn: BlockMap, caller: Caller) -> dict[str, Any]:
    """Return the block map in cells: a digit per state, and the owner's index in ``tenants``.

    In a large pool a cell stands for several blocks, and ``mixes`` has their number in each state.
    Callers that do not administer get only their own blocks, without gaps.
    """
    states, owners = np.frombuffer(drawn.states, np.uint8), np.asarray(drawn.owners)
    tenants = [_name(state, salt) for salt in drawn.tenants]
    if not caller.may_administer:
        salt = caller.salt.encode()
        own = drawn.tenants.index(salt) if salt in drawn.tenants else len(drawn.tenants)
        states, tenants = states[owners == own], [caller.tenant]
        owners = np.zeros(len(states), int)
    per_cell = 1 if len(states) <= MAX_CELLS else -(-len(states) // MANY_CELLS)
    mixes = _count_by_cell(states, per_cell, len(BlockState))
    shown = np.array(SHOWN_STATES)[(mixes[:, SHOWN_STATES] > 0).argmax(1)]
    prompt_context = _count_by_cell(owners + 1, per_cell, len(tenants) + 1)[:, 1:]
    main_owners = prompt_context.argmax(1) if tenants else np.zeros(len(prompt_context), int)
    return {
        "count": len(states),
        "per_cell": per_cell,
        "states": "".join(map(str, shown.tolist())),
        "mixes": mixes.tolist() if per_cell > 1 else [],
        "owners": np.where(prompt_context.any(1), main_owners, -1).tolist(),
        "tenants": tenants,
        "counts": {kind.name.lower(): int(mixes[:, kind].sum()) for kind in BlockState},
    }


def _count_by_cell(
    values: npt.NDArray[Any], per_cell: int, num_values: int
) -> npt.NDArray[np.int64]:
    """Count the values in each cell; shape (num_cells, num_values)."""
    num_cells = -(-len(values) // per_cell)
    places = np.arange(len(values)) // per_cell * num_values + values
    return np.bincount(places, minlength=num_cells * num_values).reshape(num_cells, num_values)


def _name(state: ServerState, salt: bytes) -> str:
    """Return the owner of a salt: a tenant, or a public prefix."""
    public = public_name(salt)
    return state.usage.name_of(salt) if public is None else f"public: {public}"


async def _prefixes(state: ServerState, prefixes: list[CachedPrefix]) -> list[dict[str, Any]]:
    """List prefixes with their texts, which are decoded in another thread."""
    decode = state.llm.tokenizing.decode_each
    heads = await decode([prefix.head.tolist() for prefix in prefixes])
    branches = await decode([prefix.branch.tolist() for prefix in prefixes])
    return [
        {
            "head": head,
            "branch": branch,
            "tokens": prefix.num_tokens,
            "own_tokens": prefix.own_tokens,
            "blocks": prefix.own_blocks,
            "blocks_below": prefix.num_blocks_below,
            "hits": prefix.num_hits,
            "holders": prefix.num_holders,
            "age_s": prefix.age_s,
            "saved": prefix.saved_tokens,
            "tenant": _name(state, prefix.identity.owner),
        }
        for prefix, head, branch in zip(prefixes, heads, branches, strict=True)
    ]


class Comparison:
    """The hits of plug-ins beside those of the built-in parts, for the page of a lab's student.

    Ended requests are replayed under the built-in parts, one replay at a time.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        """Begin without a result."""
        config = llm.engine.config
        self._names = plugin_names(config)
        self._caching, self._scheduling = llm.engine.cache.config, llm.engine.scheduler.config
        self._watch = EngineWatch(llm, _read)
        self._result: dict[str, Any] = {"names": self._names, "requests": 0, "faults": 0}
        self._replay: asyncio.Task[None] | None = None

    async def look(self) -> dict[str, Any] | None:
        """Return the newest result, and begin the next; None without plug-ins."""
        if not self._names:
            return None
        served, num_faults = await self._watch.look()
        self._result["faults"] = num_faults
        is_running = self._replay is not None and not self._replay.done()
        if not is_running and len(served) != self._result["requests"]:
            self._replay = asyncio.create_task(self._compare(served))
        return self._result

    async def _compare(self, served: list[Arrival]) -> None:
        both = await asyncio.to_thread(compare, served, self._caching, self._scheduling)
        total = max(1, both.prompt_tokens)
        self._result |= {
            "requests": both.num_requests,
            "prompt": both.prompt_tokens,
            "own_ratio": both.own_tokens / total,
            "built_in_ratio": both.built_in_tokens / total,
        }


def plugin_names(config: EngineConfig) -> list[str]:
    """Return the names of an engine's plug-ins, without their folders."""
    values = (config.index, config.eviction_policy, config.order)
    return [value.rpartition("/")[2] for value in values if is_plugin(value)]


def _read(engine: Engine) -> tuple[list[Arrival], int]:
    """Return the ended requests, and how often plug-ins failed."""
    manager, order = engine.cache.manager, engine.scheduler.requests.order
    parts = [manager.index, *manager.pool.shares.policies]
    faults = [getattr(part, "faults", None) for part in parts]
    return served_requests(arrivals_of(order)), sum(f.num_faults for f in faults if f is not None)

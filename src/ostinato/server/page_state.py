"""What does the page show, and to whom?

The administrator sees all tenants, everybody else their own lines, blocks and prefixes alone: not
even how many blocks there are, for load of others could be read from it.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

import ostinato
from ostinato.core.identity import Identity
from ostinato.engine.engine import Engine
from ostinato.engine.snapshot import Snapshot
from ostinato.observe.introspection import (
    BlockMap,
    BlockState,
    CachedPrefix,
    map_blocks,
    top_prefixes,
)
from ostinato.server.callers import Caller, CallerOfRequest
from ostinato.server.engine_watch import EngineWatch
from ostinato.server.state import ServerState
from ostinato.server.tenant_usage import HISTORY_S, Account, FirstToken, PromptTokens, merge

router = APIRouter(include_in_schema=False)

MAX_PREFIXES = 14
"""Prefixes in the list."""

MAX_CELLS = 4096
"""Cells of the block map; of a larger pool, one cell stands for several blocks."""

MAX_DOTS = 400
"""Requests in the picture of first tokens."""

MAX_WATCHES = 64
"""Callers for whom what was seen is remembered."""

PUBLIC = b"\xff"
"""How the salts of published prefixes begin; no text begins so."""

COLD_BELOW, WARM_FROM = 0.1, 0.5
"""Shares of a prompt that hit, of requests called cold and warm."""

LIVELIEST = (BlockState.PRIVATE, BlockState.HELD, BlockState.EVICTABLE, BlockState.SCRATCH)
"""Which of its blocks a cell shows first."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the cache.

    Attributes:
        blocks: The map of all blocks.
        prefixes: The top_prefixes that the caller may see.
    """

    blocks: BlockMap
    prefixes: list[CachedPrefix]


def install(app: FastAPI, state: ServerState) -> None:
    """Give an application a memory of what was seen, which forgets tenants with their usage."""
    app.state.sights = sights = dict[str, EngineWatch[Seen]]()
    state.usage.when_forgetting(sights.clear)


@router.get("/ui/state")
async def page_state(
    request: Request, response: Response, caller: CallerOfRequest
) -> dict[str, Any]:
    """Return all that the page shows, for one caller."""
    response.headers["Cache-Control"] = "no-store"
    state: ServerState = request.app.state.server
    watches: dict[str, EngineWatch[Seen]] = request.app.state.sights
    snapshots: EngineWatch[Snapshot] = request.app.state.snapshots
    seen = await _watch_of(watches, state, caller).look()
    snapshot = await snapshots.look()
    accounts = state.usage.accounts
    if not caller.may_administer:
        accounts = {name: of for name, of in accounts.items() if name == caller.tenant}
    account, now_s = merge(accounts.values()), state.usage.now_s()
    return {
        "model": state.config.model_names[0],
        "version": ostinato.__version__,
        "tenant": caller.tenant,
        "administrator": caller.may_administer,
        "block_size": state.llm.engine.cache.config.block_size,
        "totals": _totals(account),
        "last_minute": _tokens(_recent(account, now_s, 60)),
        "first_token": _first_tokens(account.first_tokens, now_s),
        "history": _history(account, now_s),
        "tenants": _tenants(accounts) if caller.may_administer else [],
        "load": _load(state, snapshot) if caller.may_administer else None,
        "blocks": _blocks(state, seen.blocks, caller),
        "prefixes": await _prefixes(state, seen.prefixes),
    }


def _watch_of(
    watches: dict[str, EngineWatch[Seen]], state: ServerState, caller: Caller
) -> EngineWatch[Seen]:
    """Return who looks at the cache for a caller; one look serves all that may see the same."""
    name = "" if caller.may_administer else caller.salt
    if name not in watches:
        if len(watches) >= MAX_WATCHES:
            watches.pop(next(iter(watches)))

        def sees(identity: Identity) -> bool:
            return caller.may_administer or identity.owner == caller.salt.encode()

        def look(engine: Engine) -> Seen:
            found = top_prefixes(engine.cache.manager, engine.cache.hits, MAX_PREFIXES, sees)
            return Seen(map_blocks(engine.cache.manager), found)

        watches[name] = EngineWatch(state.llm, look)
    return watches[name]


def _tokens(prompt: PromptTokens) -> dict[str, Any]:
    return {
        "prompt": prompt.total,
        "computed": prompt.computed,
        "cached": prompt.cached,
        "copied": prompt.copied,
        "waited": prompt.waited,
        "hit_ratio": prompt.hit_share,
    }


def _totals(account: Account) -> dict[str, Any]:
    counts = {"requests": account.num_requests, "output": account.output_tokens}
    return counts | _tokens(account.prompt) | {"saved": account.prompt.hit}


def _recent(account: Account, now_s: float, seconds: int) -> PromptTokens:
    """Sum up the last seconds."""
    found = PromptTokens()
    for second in account.seconds:
        if second.number > now_s - seconds:
            found.add(second.prompt)
    return found


def _history(account: Account, now_s: float) -> dict[str, Any]:
    """List seconds with anything in them: how long ago, and tokens by origin."""
    rows = [
        [int(now_s) - second.number, second.prompt.computed, second.prompt.cached,
         second.prompt.copied, second.prompt.waited]
        for second in account.seconds if second.number > now_s - HISTORY_S
    ]  # fmt: skip
    return {"seconds": HISTORY_S, "rows": rows}


def _first_tokens(firsts: Iterable[FirstToken], now_s: float) -> dict[str, Any]:
    """Compare first tokens of prompts that were hardly cached with those that mostly were."""
    recent = [first for first in firsts if first.at_s > now_s - HISTORY_S]
    cold = [first.took_s for first in recent if first.hit_share < COLD_BELOW]
    warm = [first.took_s for first in recent if first.hit_share >= WARM_FROM]
    dots = [
        [round(now_s - first.at_s, 2), round(first.took_s, 5), round(first.hit_share, 3)]
        for first in recent[-MAX_DOTS:]
    ]
    return {
        "cold": {"count": len(cold), "median_s": median(cold) if cold else None},
        "warm": {"count": len(warm), "median_s": median(warm) if warm else None},
        "dots": dots,
    }


def _tenants(accounts: dict[str, Account]) -> list[dict[str, Any]]:
    """List tenants, whoever asked most first."""
    most_first = sorted(accounts.items(), key=lambda item: -item[1].prompt.total)
    return [
        {"name": name, "requests": account.num_requests} | _tokens(account.prompt)
        for name, account in most_first[:MAX_PREFIXES]
    ]


def _load(state: ServerState, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "live": state.num_live,
        "steps": snapshot.scheduler.num_steps,
        "preemptions": snapshot.scheduler.num_preemptions,
        "evicted_blocks": snapshot.cache.evicted_blocks,
        "leased_blocks": snapshot.num_leased_blocks,
        "compute_path": str(snapshot.compute_path),
    }


def _blocks(state: ServerState, drawn: BlockMap, caller: Caller) -> dict[str, Any]:
    """Lay the map out in cells: a digit per state, and the owner's place in ``tenants``.

    Whoever does not administer gets its own blocks in a row, as if there were no others.
    """
    own = list(range(len(drawn.states)))
    owners, tenants = drawn.owners, [_name(state, salt) for salt in drawn.tenants]
    if not caller.may_administer:
        salt = caller.salt.encode()
        own = [
            block for block in own if owners[block] >= 0 and drawn.tenants[owners[block]] == salt
        ]
        owners, tenants = array("i", bytes(4 * len(drawn.states))), [caller.tenant]
    per_cell = -(-len(own) // MAX_CELLS) or 1
    cells = [own[i : i + per_cell] for i in range(0, len(own), per_cell)]
    shown = [
        min(cell, key=lambda b: LIVELIEST.index(BlockState(drawn.states[b]))) for cell in cells
    ]
    return {
        "count": len(own),
        "per_cell": per_cell,
        "states": "".join(str(drawn.states[block]) for block in shown),
        "owners": [owners[block] for block in shown],
        "tenants": tenants,
        "counts": {
            kind.name.lower(): sum(drawn.states[block] == kind for block in own)
            for kind in BlockState
        },
    }


def _name(state: ServerState, salt: bytes) -> str:
    """Say whose a salt is: a tenant's, or that of a published prefix."""
    if salt.startswith(PUBLIC):
        return f"public: {salt[len(PUBLIC) :].decode()}"
    return state.usage.name_of(salt)


async def _prefixes(state: ServerState, prefixes: list[CachedPrefix]) -> list[dict[str, Any]]:
    """List prefixes with their texts, which are decoded beside the event loop."""
    heads = await state.llm.decode_each([prefix.head.tolist() for prefix in prefixes])
    branches = await state.llm.decode_each([prefix.branch.tolist() for prefix in prefixes])
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

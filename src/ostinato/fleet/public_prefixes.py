"""Public prefixes, published at a requested number of workers.

Workers name them in events by names of their own, so the router keeps what it published where: a
tenant's prompt that begins with one counts as cached there up to its end. A worker that was started
anew has none any more.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from ostinato.engine.public_prefixes import ALL_PUBLIC
from ostinato.fleet.fleet import Fleet
from ostinato.fleet.prompts import read_prompt
from ostinato.fleet.tokens import PromptTokens
from ostinato.fleet.worker import Worker
from ostinato.router import RouteRequest
from ostinato.server.errors import ApiError

_MOST_PREFIXES = 1000


@dataclass(slots=True)
class _Published:
    """One prefix: its tokens, if known, and how many of them each worker holds."""

    tokens: tuple[int, ...]
    held: dict[str, int] = field(default_factory=dict)


class FleetPrefixes:
    """The public prefixes of a fleet, by name."""

    def __init__(self, fleet: Fleet, tokens: PromptTokens) -> None:
        """Begin without one."""
        self._fleet = fleet
        self._tokens = tokens
        self._published: dict[str, _Published] = {}

    def held(self, asked: RouteRequest, names: Iterable[str]) -> dict[str, int]:
        """Return how many tokens of a prompt each worker holds as a public prefix."""
        wanted, found = set(names), dict[str, int]()
        for name, known in self._published.items():
            size = len(known.tokens)
            if not size or asked.characters or not wanted & {name, ALL_PUBLIC}:
                continue
            if size < len(asked.tokens) and tuple(asked.tokens[:size]) == known.tokens:
                for worker, num_tokens in known.held.items():
                    found[worker] = max(found.get(worker, 0), num_tokens)
        return found

    def lost(self, worker: str) -> None:
        """Handle the restart or removal of a worker."""
        for known in self._published.values():
            known.held.pop(worker, None)

    async def publish(self, name: str, body: bytes, copies: int) -> dict[str, dict[str, object]]:
        """Publish a prefix at so many workers, those that hold it included; returns each answer.

        Raises:
            ApiError: There are not so many workers, or too many prefixes (409).
        """
        known = self._published.get(name) or await self._read(body)
        able = [w for w in self._fleet.workers.values() if w.is_well and w.name not in known.held]
        able.sort(key=lambda worker: worker.num_live)
        missing = copies - len(known.held)
        if missing > len(able):
            raise ApiError(
                409,
                f"copies={copies}: {len(able) + len(known.held)} workers are well; ask for fewer",
                param="copies",
                code="no_worker",
            )
        if name not in self._published and len(self._published) >= _MOST_PREFIXES:
            raise ApiError(409, f"there are {_MOST_PREFIXES} public prefixes: unpublish some")
        chosen = able[: max(0, missing)]
        path = f"/admin/public/{name}"
        told = await asyncio.gather(*(_send(w, "PUT", path, body) for w in chosen))
        for worker, answer in zip(chosen, told, strict=True):
            if isinstance(number := answer.get("num_tokens"), int):
                known.held[worker.name] = number
        if known.held:
            known.tokens = known.tokens[: min(known.held.values())]
            self._published[name] = known
        return {worker.name: answer for worker, answer in zip(chosen, told, strict=True)}

    async def unpublish(self, name: str, body: bytes) -> dict[str, dict[str, object]]:
        """Unpublish a prefix at every worker; return their responses."""
        self._published.pop(name, None)
        workers = list(self._fleet.workers.values())
        path = f"/admin/public/{name}/unpublish"
        told = await asyncio.gather(*(_send(w, "POST", path, body) for w in workers))
        return {worker.name: answer for worker, answer in zip(workers, told, strict=True)}

    async def _read(self, body: bytes) -> _Published:
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        prompt = read_prompt(path, body)
        if prompt.messages is not None:
            prompt.template.setdefault("add_generation_prompt", False)
        asked = await self._tokens.request(prompt, "", "", "", {})
        return _Published(() if asked.characters else tuple(asked.tokens))


async def _send(worker: Worker, method: str, path: str, body: bytes) -> dict[str, object]:
    """Return a worker's response, or its error."""
    try:
        return await worker.administer(method, path, body)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        worker.failed(error)
        return {"error": type(error).__name__}


def copies_of(request: web.Request, most: int) -> int:
    """Return how many copies a request asks for; all that there can be, if it does not say.

    Raises:
        ApiError: It is no number above 0 (400).
    """
    copies = request.query.get("copies", str(most))
    if not copies.isdigit() or not int(copies):
        raise ApiError(400, f"copies={copies:.20}: must be at least 1", param="copies")
    return int(copies)

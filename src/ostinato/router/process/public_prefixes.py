"""Public prefixes, published at a requested number of workers.

Events name them by each worker's own salts, so the router records what it published where: the
prompt of a tenant that begins with one counts as cached there up to its end. A worker that restarts
loses its prefixes.
"""

import asyncio
from array import array
from collections.abc import Iterable, Sequence

import aiohttp
from aiohttp import web

from ostinato.engine.prompts.public_prefixes import ALL_PUBLIC
from ostinato.router.policy import RouteRequest
from ostinato.router.process.tokens import RoutingTokenizer
from ostinato.router.process.worker import Worker
from ostinato.router.process.worker_pool import WorkerPool
from ostinato.server.errors import ApiError

_MAX_PREFIXES = 1000


class FleetPrefixes:
    """The public prefixes of a fleet, by name; ``Worker.public_prefixes`` says who has them."""

    def __init__(self, fleet: WorkerPool, tokens: RoutingTokenizer) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._published: dict[str, array[int]] = {}  # tokens, empty if unknown

    def cached_tokens(self, request: RouteRequest, names: Iterable[str]) -> dict[str, int]:
        """Return how many tokens of a prompt each worker has cached as a public prefix."""
        requested, cached_by_worker = set(names), dict[str, int]()
        for name, tokens in self._published.items():
            if not tokens or request.characters or not requested & {name, ALL_PUBLIC}:
                continue
            size = len(tokens)
            if size < len(request.tokens) and request.tokens[:size] == tokens:
                for worker in self._fleet.workers.values():
                    cached = worker.public_prefixes.get(name, 0)
                    cached_by_worker[worker.name] = max(
                        cached_by_worker.get(worker.name, 0), cached
                    )
        return cached_by_worker

    async def publish(self, name: str, body: bytes, copies: int) -> dict[str, dict[str, object]]:
        """Publish a prefix until this many workers have it; returns their responses.

        Raises:
            ApiError: There are too few workers, or too many prefixes (409).
        """
        tokens = self._published.get(name) or await self._read(body)
        workers = self._fleet.workers.values()
        having = [w for w in workers if name in w.public_prefixes]
        able = [w for w in workers if w.is_well and w not in having]
        able.sort(key=lambda worker: worker.num_live)
        missing = copies - len(having)
        if missing > len(able):
            raise ApiError(
                409,
                f"copies={copies}: {len(able) + len(having)} workers are well; ask for fewer",
                param="copies",
                code="no_worker",
            )
        if name not in self._published and len(self._published) >= _MAX_PREFIXES:
            raise ApiError(409, f"there are {_MAX_PREFIXES} public prefixes: unpublish some")
        answers = await _send(able[: max(0, missing)], "PUT", f"/admin/public/{name}", body)
        for worker in able[: max(0, missing)]:
            if isinstance(number := answers[worker.name].get("num_tokens"), int):
                worker.public_prefixes[name] = number
        sizes = [w.public_prefixes[name] for w in workers if name in w.public_prefixes]
        if sizes:
            self._published[name] = tokens[: min(sizes)]
        return answers

    async def unpublish(self, name: str, body: bytes) -> dict[str, dict[str, object]]:
        """Unpublish a prefix at every worker; return their responses."""
        self._published.pop(name, None)
        workers = list(self._fleet.workers.values())
        for worker in workers:
            worker.public_prefixes.pop(name, None)
        return await _send(workers, "POST", f"/admin/public/{name}/unpublish", body)

    async def _read(self, body: bytes) -> "array[int]":
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        prompt = await self._tokens.read(path, body, "")
        if prompt.messages is not None:
            prompt.template.setdefault("add_generation_prompt", False)
        request = await self._tokens.request(prompt, "", "", "", {})
        return array("I", () if request.characters else request.tokens)


async def _send(
    workers: Sequence[Worker], method: str, path: str, body: bytes
) -> dict[str, dict[str, object]]:
    """Return the responses of workers, or their errors."""

    async def send(worker: Worker) -> dict[str, object]:
        try:
            return await worker.administer(method, path, body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            worker.failed(error)
            return {"error": type(error).__name__}

    answers = await asyncio.gather(*map(send, workers))
    return {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}


def copies_of(request: web.Request, max_copies: int) -> int:
    """Return how many copies a request asks for, by default ``max_copies``.

    Raises:
        ApiError: It is not a number above 0 (400).
    """
    copies = request.query.get("copies", str(max_copies))
    if not copies.isdigit() or not int(copies):
        raise ApiError(400, f"copies={copies:.20}: must be at least 1", param="copies")
    return int(copies)

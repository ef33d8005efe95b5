"""One worker: its address, health, models and load."""

import asyncio
import logging
import os
import time
from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ostinato.router.policy import WorkerPrices
from ostinato.router.process.config import WorkerSpec
from ostinato.router.process.kv_feed import Endpoints, KVFeed, WorkerSnapshot

logger = logging.getLogger("ostinato")

_PROBE_TIMEOUT_S = 5.0
TOKENIZE_TIMEOUT_S = 5.0
_TOKENIZE_PAUSE_S = 60.0
"""Seconds without tokenizing at a worker after a failure."""

_SNAPSHOT_TIMEOUT_S = 30.0
_ADMINISTER_TIMEOUT_S = 600.0
_MAX_ANSWER_BYTES = 2**20
_MAX_SNAPSHOT_BYTES = 2**29
_MAX_TOKENS_BYTES = 2**25
_MAX_MODELS = 1000
_MAX_LATE = 2
"""Consecutive health-check timeouts after which a worker is unhealthy."""

_NO_ROUTE = (404, 405)
_NOT_CHECKED = "not checked yet whether it keeps tenants apart"
_ONE_KEY = (
    "it is an Ostinato server, and with --replace-keys all tenants would share the rights and the "
    "cache of one key: start it with the router's keys file, and leave out --replace-keys"
)
_NO_KEYS = (
    "it is an Ostinato server without keys, where all tenants may administer and share one cache: "
    "start it with the router's keys file"
)


@dataclass(eq=False)
class Worker:
    """A worker; what it has cached is tracked by the router.

    Attributes:
        spec: Its address and name.
        session: HTTP client.
        key: Key of the router's own requests.
        has_tenants: Whether the router's callers have keys, and must be kept apart.
        replaces_keys: Whether ``key`` is sent in place of the callers' keys.
        refusal: Why no tenant's request may go there; empty if they may.
        is_well: Whether it is healthy; False until it was reached.
        is_draining: Whether it leaves when its last request has ended.
        trouble: Why it is unhealthy; empty if it is healthy.
        models: Its models, with the adapters in its events; empty if unknown.
        is_ours: Whether it is an Ostinato, which has snapshots.
        tokenizes: Whether it answers ``/tokenize``.
        has_prices: Whether it publishes the prices of its steps, as far as is known.
        num_live: Unfinished requests.
        num_failed: Requests that failed.
        was_gone: Whether it was unreachable since it was healthy, so it may have restarted.
        waiting: Limits of the requests that wait for a first byte, and may be moved: their model,
            and the workers that failed them.
        broke_off: Whether a response broke off since the last health check.
        public_prefixes: Tokens of each public prefix published there, by name.
        feed: Its events; None without.
        tasks: Its monitoring tasks.
    """

    spec: WorkerSpec
    session: aiohttp.ClientSession
    key: str | None = None
    has_tenants: bool = False
    replaces_keys: bool = False
    refusal: str = ""
    is_well: bool = False
    is_draining: bool = False
    trouble: str = "not reached yet"
    models: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    tokenizes: bool = True
    has_prices: bool = True
    num_live: int = 0
    num_failed: int = 0
    was_gone: bool = False
    waiting: dict[asyncio.Timeout, tuple[str, Set[str]]] = field(default_factory=dict)
    broke_off: bool = False
    public_prefixes: dict[str, int] = field(default_factory=dict)
    feed: KVFeed | None = None
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _num_late: int = 0
    _tokenizes_at_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse tenants' requests until it was checked."""
        if self.has_tenants:
            self.refusal = _NOT_CHECKED

    @property
    def name(self) -> str:
        """Name in headers, metrics and logs."""
        return self.spec.name

    @property
    def is_late(self) -> bool:
        """Whether the last health check had no answer in time."""
        return self._num_late > 0

    def serves(self, model: str) -> bool:
        """Whether it serves a model, as far as is known."""
        return not model or not self.models or model in self.models

    async def probe(self) -> bool:
        """Check its health; return whether it accepts requests."""
        try:
            status, _ = await self._get("/ready")
            if status in _NO_ROUTE:
                status, _ = await self._get("/health")
            if status == 200 and self.refusal:
                await self._check_tenancy()
            if status == 200 and not self.models:
                await self._learn()
            self.trouble = self.refusal if status == 200 else f"its health is {status}"
            self._num_late = 0
        except TimeoutError:
            self._num_late += 1
            if self._num_late >= _MAX_LATE:
                self.trouble = f"it did not answer {self._num_late} times"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                self._note_gone()
            self.trouble = _short(error)
        was_well, self.is_well = self.is_well, not self.trouble
        if was_well != self.is_well:
            logger.warning("worker %s: %s", self.name, self.trouble or "well")
            if not self.is_well:
                self.models.clear()  # another model may come back
        return self.is_well

    def failed(self, error: Exception) -> None:
        """Record a request without an answer; if nothing listens there, it becomes unhealthy.

        A timeout may be the router's fault, on a busy machine: the next health check decides.
        """
        self.num_failed += 1
        if not isinstance(error, aiohttp.ClientConnectorError):
            self.broke_off |= isinstance(error, aiohttp.ClientPayloadError | ConnectionError)
            return
        self._note_gone()
        self.trouble = _short(error)
        if self.is_well:
            logger.warning("worker %s did not answer: %s", self.name, self.trouble)
        self.is_well = False

    async def endpoints(self) -> Endpoints | None:
        """Return the endpoints of its events; None if it has none, or does not say.

        Only ports are taken from the worker, and the host from its address, so that no worker can
        make the router connect elsewhere.
        """
        if self.spec.events is not None:
            return Endpoints(self.spec.events, self.spec.replay, self.spec.topic)
        try:
            status, content = await self._get("/admin/kv/events")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None
        if status != 200 or not isinstance(content, dict):
            return None
        self.is_ours = True
        events = self._at_host(content.get("endpoint"))
        replay = self._at_host(content.get("replay_endpoint"))
        return None if events is None else Endpoints(events, replay, str(content.get("topic", "")))

    async def snapshot(self) -> WorkerSnapshot | None:
        """Fetch a snapshot of its cache; None if it is no Ostinato, or fails."""
        try:
            if self.spec.events is not None and not self.is_ours:
                self.is_ours = (await self._get("/admin/kv/events"))[0] == 200
            if not self.is_ours:
                return None
            path, timeout_s = "/admin/kv/snapshot", _SNAPSHOT_TIMEOUT_S
            status, headers, payload = await self._request(
                "GET", path, timeout_s=timeout_s, max_bytes=_MAX_SNAPSHOT_BYTES
            )
            return (
                WorkerSnapshot(int(headers["x-kv-events-sequence"]), payload)
                if status == 200
                else None
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            logger.warning("worker %s: no snapshot: %r", self.name, error)
            return None

    async def prices(self) -> WorkerPrices | None:
        """Return the prices of its steps; None if it publishes none."""
        if not self.has_prices:
            return None
        try:
            status, content = await self._get("/admin/steps")
            self.has_prices = status not in _NO_ROUTE
            return prices_in(content) if status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError, KeyError):
            return None

    @property
    def can_tokenize(self) -> bool:
        """Whether it can be asked for tokens."""
        return self.is_well and self.tokenizes and time.monotonic() >= self._tokenizes_at_s

    async def tokenize(self, body: dict[str, Any], headers: dict[str, str]) -> "array[int] | None":
        """Return the worker's own tokens of a prompt; None if it has no answer."""
        try:
            status, _, answer = await self._request(
                "POST",
                "/tokenize",
                await asyncio.to_thread(msgspec.json.encode, body),
                headers=headers,
                timeout_s=TOKENIZE_TIMEOUT_S,
                max_bytes=_MAX_TOKENS_BYTES,
            )
            if status in (404, 405, 501):
                self.tokenizes = False
            if status != 200:
                return None
            return await asyncio.to_thread(_tokens_in, answer)
        except (aiohttp.ClientError, OSError, ValueError):
            self._tokenizes_at_s = time.monotonic() + _TOKENIZE_PAUSE_S
            raise

    async def administer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        """Return the response of an administration route, errors included."""
        timeout_s = _ADMINISTER_TIMEOUT_S
        status, _, answer = await self._request(method, path, body, timeout_s=timeout_s)
        content = msgspec.json.decode(answer)
        return content if isinstance(content, dict) else {"error": f"status {status}"}

    def cancel(self) -> None:
        """Stop monitoring it."""
        for task in self.tasks:
            task.cancel()

    def _note_gone(self) -> None:
        """Note that nothing listens there: another server may come back."""
        self.was_gone = self.has_prices = True
        if self.has_tenants:
            self.refusal = _NOT_CHECKED

    async def _check_tenancy(self) -> None:
        """Refuse an engine that would take the router's tenants for one caller.

        An Ostinato server keeps tenants apart by their own keys alone. Other engines know no
        tenants, with or without this router.
        """
        before, headers = self.refusal, self._key_header() if self.replaces_keys else {}
        status, _, _ = await self._request(
            "GET", "/admin/kv/events", headers=headers, timeout_s=_PROBE_TIMEOUT_S
        )
        self.refusal = ""
        if self.replaces_keys and status not in _NO_ROUTE:
            self.refusal = _ONE_KEY
        elif status not in (*_NO_ROUTE, 401, 403):
            self.refusal = _NO_KEYS
        if self.refusal and self.refusal != before:
            logger.warning("worker %s gets no requests: %s", self.name, self.refusal)

    async def _learn(self) -> None:
        """Fetch its models."""
        status, content = await self._get("/v1/models")
        if status != 200 or not isinstance(content, dict):
            return
        for model in list(content.get("data") or ())[:_MAX_MODELS]:
            name = str(model["id"])
            self.models[name] = name if model.get("parent") else ""

    def _at_host(self, endpoint: Any) -> str | None:
        """Return an endpoint's port at the worker's own host."""
        if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
            return None
        port = endpoint.rpartition(":")[2]
        host = urlsplit(self.spec.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"tcp://{host}:{int(port)}" if port.isdigit() else None

    async def _get(self, path: str) -> tuple[int, Any]:
        """Return the status and, if it is JSON, the content of a route."""
        status, headers, body = await self._request("GET", path, timeout_s=_PROBE_TIMEOUT_S)
        is_json = "json" in headers.get("content-type", "")
        return status, msgspec.json.decode(body) if is_json and body else None

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body; without headers, the router's own key is sent.

        Raises:
            ClientError, OSError: There was no complete answer in time.
            ValueError: The answer is longer than ``max_bytes``.
        """
        sent = dict(headers) if headers is not None else self._key_header()
        if body is not None:
            sent["Content-Type"] = "application/json"
        async with self.session.request(
            method,
            self.spec.url + path,
            data=body,
            headers=sent,
            timeout=aiohttp.ClientTimeout(timeout_s),
            allow_redirects=False,
        ) as answer:
            content = bytearray()
            async for piece in answer.content.iter_chunked(2**16):
                content += piece
                if len(content) > max_bytes:
                    raise ValueError(f"an answer of more than {max_bytes} bytes")
            return answer.status, answer.headers, bytes(content)

    def _key_header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def _tokens_in(answer: bytes) -> "array[int] | None":
    content = msgspec.json.decode(answer)
    tokens = content.get("tokens") if isinstance(content, dict) else None
    return array("I", tokens) if isinstance(tokens, list) else None


def prices_in(content: Any) -> WorkerPrices | None:
    """Return the prices in an answer of ``/admin/steps``; None if they cannot be.

    Raises:
        KeyError, TypeError, ValueError: It has another form.
    """
    prices = content["prices"]
    if prices is None:
        return None
    token_s, pair_s = float(prices["token_s"]), float(prices["pair_s"])
    if not (0 < token_s < inf and 0 <= pair_s < inf):
        return None
    return WorkerPrices(token_s, pair_s, content["order"] == "shortest_first")


def _short(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        why = os.strerror(number) if number and number > 0 else error.os_error
        return f"cannot be reached: {why}"[:200]
    return f"{type(error).__name__}: {error}"[:200]

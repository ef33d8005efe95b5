"""Routes and middleware.

An aiohttp application, whose parser and client forward a request in a fraction of a millisecond.
"""

import logging
from collections.abc import AsyncIterator
from functools import cache
from importlib.resources import files

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ostinato.core.errors import OstinatoError
from ostinato.protocol.lenient import ROUTED_PATHS
from ostinato.router.process.admin import FleetAdmin
from ostinato.router.process.admission import Admission
from ostinato.router.process.config import FleetConfig
from ostinato.router.process.connections import note_requests
from ostinato.router.process.decisions import DecisionLog
from ostinato.router.process.metrics import FleetMetrics
from ostinato.router.process.proxy import Proxy
from ostinato.router.process.public_prefixes import FleetPrefixes
from ostinato.router.process.tokenizer import LocalTokenizer
from ostinato.router.process.tokens import RoutingTokenizer
from ostinato.router.process.worker_pool import WorkerPool
from ostinato.server.access.callers import AnyCaller, KeyedCallers
from ostinato.server.config import is_loopback_address
from ostinato.server.errors import ApiError, api_error, body_of, foreign_host
from ostinato.server.page.page import HEADERS as PAGE_HEADERS
from ostinato.server.page.page import TYPES

logger = logging.getLogger("ostinato")

_KEY_FORM_HERE = "<!-- the server's form for a key -->"

_IDLE_S = 4.0
"""Keep-alive of connections to workers: shorter than uvicorn's five seconds."""

FORWARDED = (
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/responses/{number}"),
    ("DELETE", "/v1/responses/{number}"),
    ("GET", "/v1/responses/{number}/input_items"),
    ("POST", "/v1/responses/{number}/cancel"),
    ("GET", "/v1/explain/{number}"),
)
"""Routes forwarded to any worker, or to the one that stored a response."""


class FleetApp:
    """The application of a router process.

    Attributes:
        config: The settings.
        fleet: The workers.
        admission: Admits requests.
        proxy: Forwards requests.
        web: The aiohttp application.
    """

    def __init__(self, config: FleetConfig) -> None:
        """Build a router in a running event loop; workers join when ``web`` starts.

        Raises:
            ConfigError: The keys file or the tokenizer cannot be read.
        """
        self.config = config
        self._callers = KeyedCallers(config.keys_file) if config.keys_file else AnyCaller()
        tokenizer, limit = None, config.max_prompt_characters
        if config.tokenizer:
            tokenizer = LocalTokenizer(config.tokenizer, limit)
        self._session = _make_session(config)
        self.fleet = WorkerPool(config, self._session)
        self._metrics = FleetMetrics(self.fleet)
        self._tokens = RoutingTokenizer(
            self.fleet.workers, tokenizer, limit, self._metrics.tokenized
        )
        decisions = DecisionLog()
        self.admission = Admission(config, self._callers)
        prefixes = FleetPrefixes(self.fleet, self._tokens)
        self.proxy = Proxy(
            self.fleet, self.admission, self._tokens, decisions, self._metrics, prefixes
        )
        self._admin = FleetAdmin(self.fleet, self.proxy, self.admission, decisions, prefixes)
        before = [note_requests, _answer_errors]
        if config.keys_file is None:
            before.append(_guard_host)
        self.web = web.Application(middlewares=before, client_max_size=config.max_body_bytes)
        self.web.cleanup_ctx.append(self._run)
        self._add_routes()

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        """Manage the workers while the application runs."""
        await self.fleet.start()
        yield
        await self.fleet.stop()
        await self._session.close()

    def _add_routes(self) -> None:
        add = self.web.router.add_route
        for path in ROUTED_PATHS:
            add("POST", path, self.proxy.generate)
        for method, path in FORWARDED:
            add(method, path, self.proxy.forward)
        add("GET", "/v1/models", self._models)
        for path in ("/health", "/ping"):
            add("GET", path, self._health)
        add("GET", "/ready", self._ready)
        admin = self._admin
        for method, path, handler in (
            ("GET", "/metrics", self._metrics_page),
            ("POST", "/route", admin.route),
            ("GET", "/route", admin.decisions),
            ("GET", "/route/{decision}", admin.explain),
            ("DELETE", "/route/{decision}", admin.end),
            ("GET", "/admin/workers", admin.list_workers),
            ("POST", "/admin/workers", admin.join),
            ("DELETE", "/admin/workers/{name}", admin.leave),
            ("POST", "/admin/prewarm", admin.prewarm),
            ("PUT", "/admin/public/{name}", admin.publish),
            ("POST", "/admin/public/{name}/unpublish", admin.unpublish),
            ("POST", "/admin/keys/reload", self._reload_keys),
            ("GET", "/ui/state", admin.state),
        ):
            add(method, path, admin.guarded(handler))
        add("GET", "/", _page)
        add("GET", "/ui/{file}", _page)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        if self.admission.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        if not any(worker.is_well for worker in self.fleet.workers.values()):
            return web.json_response({"status": "no worker is well"}, status=503)
        return web.json_response({"status": "ready"})

    async def _models(self, request: web.Request) -> web.Response:
        """List the models of all workers."""
        self.admission.identify(request)
        names = {name: None for w in self.fleet.workers.values() for name in w.models}
        models = [{"id": n, "object": "model", "created": 0, "owned_by": "fleet"} for n in names]
        return web.json_response({"object": "list", "data": models})

    async def _metrics_page(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._metrics.page(), headers=headers)

    async def _reload_keys(self, _: web.Request) -> web.Response:
        if not isinstance(self._callers, KeyedCallers):
            raise ApiError(409, "this router has no keys file to reload")
        self._callers.reload()
        return web.json_response({"num_tenants": len(self._callers.keys.tenants)})


def _make_session(config: FleetConfig) -> aiohttp.ClientSession:
    """Create the HTTP client for workers: no cookies, proxies, added headers or decompression."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=2**18,
    )


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the format of the path's API."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        codes = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
        message = f"{request.method} {request.path:.200}: {error.reason}"
        own_error = ApiError(error.status, message, code=codes.get(error.status))
        allow = error.headers.get("Allow")
        return _answer(request, own_error, {} if allow is None else {"Allow": allow})
    except (ApiError, OstinatoError) as error:
        return _answer(request, api_error(error), {})
    except Exception as error:
        logger.exception("a route raised")
        return _answer(request, api_error(error), {})


def _answer(request: web.Request, error: ApiError, headers: dict[str, str]) -> web.Response:
    response = web.Response(
        status=error.status,
        headers={**headers, **error.headers},
        body=msgspec.json.encode(body_of(request.path, error)),
        content_type="application/json",
    )
    if not request.content.at_eof():
        response.force_close()  # the rest of the body is not read
    return response


@web.middleware
async def _guard_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Without keys, refuse requests of foreign web pages in this machine's browsers."""
    for name, prefix in (("Host", "//"), ("Origin", "")):
        value = request.headers.get(name, "")
        if value and not is_loopback_address(prefix + value):
            raise foreign_host(name, value)
    return await handler(request)


@cache
def _key_form() -> str:
    page = files("ostinato.server").joinpath("static", "index.html").read_text("utf-8")
    start, end = page.index('<form id="key-form">'), page.index("</form>")
    return page[start:end] + "</form>"


async def _page(request: web.Request) -> web.Response:
    """Return a file of the page; the style and the form for a key are the server's."""
    name = request.match_info.get("file", "index.html")
    for room in ("ostinato.router.process", "ostinato.server"):
        entry = files(room).joinpath("static", name)
        known = {each.name for each in files(room).joinpath("static").iterdir()}
        if name in known:
            kind = TYPES[name.rpartition(".")[2]]
            text = entry.read_text("utf-8").replace(_KEY_FORM_HERE, _key_form())
            return web.Response(text=text, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)
    raise ApiError(404, f"GET /ui/{name:.100}: the page has no such file", code="unknown_url")

"""``Ingress``: OpenAI's and Anthropic's routes, forwarded to the engines.

It tokenizes prompts for the request router, outside its event loop, and forwards bodies and
responses byte for byte.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ostinato.core.errors import ConfigError, OstinatoError
from ostinato.core.identity import derive_salt
from ostinato.protocol.lenient import ROUTED_PATHS
from ostinato.router.process.headers import routing_headers, session_of
from ostinato.router.process.tokenizer import LocalTokenizer
from ostinato.router.process.tokens import RoutingTokenizer
from ostinato.router.process.usage_sniffer import UsageSniffer
from ostinato.router.ray.call import DecisionLink, RayCall, ResponseHead
from ostinato.server.access.callers import AnyCaller, KeyedCallers
from ostinato.server.errors import ApiError, api_error, body_of, body_too_long

logger = logging.getLogger("ostinato")

_MAX_BODY_BYTES = 8 * 2**20
_MAX_ATTEMPTS = 3
_FORWARDED = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
_NOT_FORWARDED = (b"host", b"origin", b"content-length", b"transfer-encoding", b"connection")


class Ingress:
    """Handles HTTP requests from Ray Serve's proxy."""

    def __init__(self, engines: DeploymentHandle, model: str, keys_file: str | None) -> None:
        """Load the tokenizer and the keys.

        Args:
            engines: Handle of the engines' deployment.
            model: Name of the model, for its tokenizer.
            keys_file: API keys; None admits all clients.
        """
        self._engines = engines.options(stream=True)
        self._callers = KeyedCallers(keys_file) if keys_file else AnyCaller()
        tokenizer: LocalTokenizer | None = None
        try:
            tokenizer = LocalTokenizer(model)
        except ConfigError as error:
            logger.warning("prompts are compared by characters: %s", error)
        self._tokens = RoutingTokenizer({}, tokenizer)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            return await self._serve(request)
        except (ApiError, OstinatoError) as error:
            refusal = api_error(error)
            content = msgspec.json.encode(body_of(request.url.path, refusal))
            headers = {**refusal.headers, "Content-Type": "application/json"}
            return Response(content, refusal.status, headers)

    async def _serve(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        is_known = (
            path in (*ROUTED_PATHS, *_FORWARDED) if method == "POST" else path == "/v1/models"
        )
        if not is_known:
            message = f"{method} {path:.200}: no such route"
            raise ApiError(404, message, code="unknown_url")
        caller = self._callers.identify(request.headers)
        body = await _read(request)
        headers = [each for each in request.headers.raw if each[0].lower() not in _NOT_FORWARDED]
        headers.append((b"host", b"127.0.0.1"))
        headers.append((b"content-length", b"%d" % len(body)))
        query = f"?{request.url.query}" if request.url.query else ""
        call = RayCall(method, path + query, headers, body)
        if path in ROUTED_PATHS:
            prompt = await self._tokens.read(path, body, caller.tenant)
            call.is_comparable = prompt.is_whole
            salt = derive_salt(caller.salt, prompt.salt)
            session = session_of(request.headers, prompt.session)
            call.route_request = await self._tokens.request(
                prompt, salt, caller.tenant, session, {}
            )
        return await self._send(call)

    async def _answered(self, call: RayCall) -> tuple[RayCall, Any, ResponseHead]:
        """Return an answer that has begun, after trying other replicas if one dies before.

        Raises:
            ApiError: Too many replicas died (503).
        """
        for _ in range(_MAX_ATTEMPTS):
            answer = self._engines.respond.remote(call)
            try:
                head = await anext(aiter(answer))
            except RayActorError:
                call.progress.ended()
                call = replace(call, progress=DecisionLink())
            except BaseException:
                call.progress.ended()
                raise
            else:
                assert isinstance(head, ResponseHead), "a replica sends the head first"
                return call, answer, head
        message = "the engines that had this request were lost: try again soon"
        raise ApiError(503, message, code="no_worker", headers={"Retry-After": "1"})

    async def _send(self, call: RayCall) -> Response:
        """Send a call to a replica, and return its response."""
        call, answer, head = await self._answered(call)
        response = StreamingResponse(_relay(call, answer, head.status), head.status)
        response.raw_headers = [h for h in head.headers if h[0] != b"transfer-encoding"]
        if (decision := call.progress.decision) is not None:
            response.headers.update(routing_headers(decision))
        return response


async def _relay(call: RayCall, answer: Any, status: int) -> AsyncIterator[bytes]:
    """Forward an answer, and report its progress to the request router."""
    peek = UsageSniffer()
    try:
        async for piece in answer:
            if status < 400:
                call.progress.first_token()
            peek.see(piece)
            yield piece
    finally:
        call.progress.ended(peek.cached_tokens if call.is_comparable else None)
        answer.cancel()  # does nothing after the end


async def _read(request: Request) -> bytes:
    """Read a body.

    Raises:
        ApiError: It is too long (413).
    """
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_BODY_BYTES:
                raise body_too_long(size, _MAX_BODY_BYTES)
    except ClientDisconnect as error:
        raise ApiError(499, "the client has disconnected") from error
    return b"".join(pieces)

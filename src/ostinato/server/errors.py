"""Error responses.

As in OpenAI's API: a status, and ``{"error": {"message", "type", "param", "code"}}``; under
``/v1/messages`` as in Anthropic's. Routes raise ``ApiError`` or any other error of Ostinato.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ostinato.errors import (
    CacheInUse,
    ConfigError,
    EngineStopped,
    InvalidSamplingParams,
    MissingTokenizer,
    OstinatoError,
    PromptTooLong,
    RequestError,
    StepFailed,
    TokenOutOfRange,
)

logger = logging.getLogger("ostinato")

_NAMED = re.compile(r"(\w+)(?:\[[^\]]*\])?=")
"""The beginning of messages about one parameter: ``top_p=2: must be ...``."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error that is sent to the client.

    Attributes:
        status: HTTP status.
        message: Human-readable message.
        kind: ``type`` in JSON.
        param: The field of the request that is wrong.
        code: Machine-readable code.
        headers: Additional headers.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


ANTHROPIC_PATH = "/v1/messages"
"""Prefix of the paths of Anthropic's API."""


def body_of(path: str, error: ApiError) -> dict[str, Any]:
    """Return an error in the shape of a path's API."""
    if path.startswith(ANTHROPIC_PATH):
        other = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_KINDS.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    shown = {"message": error.message, "type": error.kind, "param": error.param}
    return {"error": {**shown, "code": error.code}}


def response_of(path: str, error: ApiError) -> Response:
    """Return the response to a request that failed.

    In ASCII, because it may quote a lone surrogate, which UTF-8 cannot encode.
    """
    body = json.dumps(body_of(path, error)).encode()
    return Response(body, error.status, dict(error.headers), media_type="application/json")


def api_error(error: Exception) -> ApiError:
    """Translate any exception; the details of unexpected ones are not shown."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case TokenOutOfRange() | InvalidSamplingParams() | RequestError() | ConfigError():
            named = _NAMED.match(str(error))
            return ApiError(
                400, str(error), param=named[1] if named else None, code="invalid_value"
            )
        case MissingTokenizer():
            return ApiError(400, str(error), code="no_tokenizer")
        case CacheInUse():
            return ApiError(409, str(error), kind="conflict_error", code="cache_in_use")
        case EngineStopped():
            return stopping(str(error))
        case StepFailed():
            return ApiError(500, str(error), kind="server_error", code="step_failed")
        case OstinatoError():
            return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "internal error: see the server's log", kind="server_error")


def stopping(message: str) -> ApiError:
    """Return the error of a server that is shutting down."""
    return ApiError(
        503, message, "server_error", code="shutting_down", headers={"Retry-After": "5"}
    )


def foreign_host(header: str, value: str) -> ApiError:
    """Return the error for a request under a name that is not this machine's."""
    return ApiError(
        403,
        f"{header}: {value:.200} does not name this machine, and without keys no other requests "
        "are accepted: call http://127.0.0.1, or start with a keys file",
        kind="permission_error",
        code="foreign_host",
    )


def body_too_long(num_bytes: int, most: int) -> ApiError:
    """Return the error for a body that is too long."""
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more, and at most {most} are taken: send less, or "
        "raise --max-body-bytes",
        code="body_too_large",
    )


def body_too_slow(timeout_s: float, min_rate: int | None = None) -> ApiError:
    """Return the error for a body that took too long, or came below a rate in bytes per second."""
    rate = "" if min_rate is None else f" at {min_rate} bytes per second or more"
    option = "" if min_rate is None else ", or lower --min-body-rate"
    return ApiError(
        408,
        f"the body did not arrive within {timeout_s:g} s{rate}: send it faster, or raise "
        f"--body-timeout-s{option}",
        code="body_timeout",
    )


def body_in_pieces(num_pieces: int, num_bytes: int) -> ApiError:
    """Return the error for a body that came in too many pieces."""
    return ApiError(
        413,
        f"the first {num_bytes} bytes of the body came in {num_pieces} pieces: send larger chunks",
        code="too_many_pieces",
    )


def install_error_handlers(app: FastAPI) -> None:
    """Handle every exception of an app, in the shape of its path."""

    def answer(request: Request, error: Exception) -> Response:
        translated = api_error(error)
        if translated.status >= 500 and not isinstance(error, (ApiError, OstinatoError)):
            logger.error("a route raised", exc_info=error)
        return response_of(request.url.path, translated)

    def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        codes = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed"}
        code = codes.get(error.status_code)
        translated = ApiError(error.status_code, message, code=code, headers=error.headers or {})
        return response_of(request.url.path, translated)

    def answer_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param, code = describe_invalid(error.errors())
        return response_of(request.url.path, ApiError(400, message, param=param, code=code))

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(OstinatoError, answer)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(Exception, answer)


_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_content": "unsupported_content",
}
_TYPES = ("str", "int", "float", "bool", "dict", "message")
"""Members of unions, which pydantic names in place of a field."""

_MOST_SHOWN = 3


def describe_invalid(errors: Sequence[Any]) -> tuple[str, str | None, str]:
    """Describe what is wrong with a body, and where.

    Args:
        errors: Pydantic's errors; at least one.

    Returns:
        A message, the field (None for the whole body), and a code.
    """
    media = [error for error in errors if error["type"] == "unsupported_content"]
    errors = media or errors
    first = errors[0]
    param = _place(first["loc"])
    code = _CODES.get(first["type"])
    if code is None:
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        return f"unknown parameter {name!r:.200}: this server does not know it", param, code
    # Each member of a union reports an error for the same field.
    about = [error for error in errors if _top(error["loc"]) == _top(first["loc"])]
    reasons = list(dict.fromkeys(_reason(error) for error in about))[:_MOST_SHOWN]
    message = "; or: ".join(reasons)
    return (f"{param}: {message}" if param else message), param, code


def _top(loc: Sequence[str | int]) -> str | int | None:
    """Return the top-level field of a location."""
    return loc[1] if len(loc) > 1 else None


def _place(loc: Sequence[str | int]) -> str | None:
    """Format a location, such as ``messages[1].content``."""
    place = ""
    for step in loc[1:]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier() and step not in _TYPES:
            place += f".{step}" if place else step
    return place or None


def _reason(error: Any) -> str:
    """Return pydantic's message, without its prefix for our own errors."""
    return str(error["msg"]).removeprefix("Value error, ")

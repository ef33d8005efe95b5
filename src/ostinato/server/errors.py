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
        kind: ``type`` in JSON; by default that of the status.
        param: The field of the request that is wrong.
        code: Machine-readable code.
        headers: Additional headers.
    """

    status: int
    message: str
    kind: str = ""
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose the kind."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        self.kind = self.kind or _KINDS.get(self.status, other)

    def __str__(self) -> str:
        return self.message


_KINDS = {403: "permission_error", 429: "rate_limit_error"}


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
            return ApiError(500, str(error), code="step_failed")
        case OstinatoError():
            return ApiError(500, str(error))
    return ApiError(500, "internal error: see the server's log")


def unknown_name(param: str, value: object, reason: str, code: str) -> ApiError:
    """Return the error for what a field names, and is not here."""
    return ApiError(404, f"{param}={value!r:.200}: {reason}", param=param, code=code)


def stopping(message: str) -> ApiError:
    """Return the error of a server that is shutting down."""
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})


def foreign_host(header: str, value: str) -> ApiError:
    """Return the error for a request under a name that is not this machine's."""
    return ApiError(
        403,
        f"{header}: {value:.200} does not name this machine, and without keys no other requests "
        "are accepted: call http://127.0.0.1, or start with a keys file",
        code="foreign_host",
    )


def body_too_long(num_bytes: int, limit: int) -> ApiError:
    """Return the error for a body that is too long."""
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more, and at most {limit} are taken: send less, or "
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
        message, param, code = describe_invalid(error.errors(), error.body)
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
_WITHOUT_VALUE = {"missing", "value_error", "unsupported_content", "json_invalid"}
"""Kinds of errors that name the value themselves, or have none."""

_MAX_SHOWN = 3


def describe_invalid(errors: Sequence[Any], body: Any) -> tuple[str, str | None, str]:
    """Describe what is wrong with a body, and where.

    Args:
        errors: Pydantic's errors; at least one.
        body: The body as it was sent, in which their places are looked up.

    Returns:
        A message, the field (None for the whole body), and a code.
    """
    media = [error for error in errors if error["type"] == "unsupported_content"]
    placed = [(_place(error, body), error) for error in media or errors]
    # Each member of a union reports its own errors; the one that was meant fits the furthest.
    about = [each for each in placed if _top(each[1]) == _top(placed[0][1])]
    deepest = max(len(steps) for steps, _ in about)
    about = [each for each in about if len(each[0]) == deepest]
    steps, first = about[0]
    param = _written(steps)
    code = _CODES.get(first["type"])
    if code is None:
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        return f"unknown parameter {name!r:.200}: this server does not know it", param, code
    reasons = dict.fromkeys(_reason(error) for place, error in about if place == steps)
    message = "; or: ".join([*reasons][:_MAX_SHOWN])
    given = first.get("input")
    is_shown = isinstance(given, str | int | float) and first["type"] not in _WITHOUT_VALUE
    named = f"{param}={given!r:.100}" if is_shown else param
    return (f"{named}: {message}" if param else message), param, code


Steps = tuple[str | int, ...]
"""Names and positions that lead to a value of a body."""


def _top(error: Any) -> str | int | None:
    """Return the top-level field of an error."""
    return error["loc"][1] if len(error["loc"]) > 1 else None


def _place(error: Any, body: Any) -> Steps:
    """Return where an error is in the body: pydantic's place without the members of unions."""
    loc = tuple(error["loc"][1:])
    if not isinstance(body, (dict, list)):
        return loc
    return _looked_up(loc, body, error["type"] == "missing")[2]


def _looked_up(loc: Steps, value: Any, is_missing: bool) -> tuple[bool, int, Steps]:
    """Look a place up; of several readings, the best reaches its last step, and is the longest."""
    if not loc:
        return False, 0, ()
    step, rest = loc[0], loc[1:]
    left_out = _looked_up(rest, value, is_missing)
    in_list = isinstance(value, list) and isinstance(step, int) and step < len(value)
    if in_list or (isinstance(value, dict) and step in value):
        after = value[step]
    elif isinstance(value, dict) and is_missing and not rest:
        after = None
    else:
        return left_out
    ends, length, steps = _looked_up(rest, after, is_missing)
    return max(left_out, (ends or not rest, length + 1, (step, *steps)), key=lambda each: each[:2])


def _written(steps: Steps) -> str | None:
    """Format a place, such as ``messages[1].content``."""
    place = ""
    for step in steps:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier():
            place += f".{step}" if place else step
    return place or None


def _reason(error: Any) -> str:
    """Return pydantic's message, without its prefix for our own errors."""
    return str(error["msg"]).removeprefix("Value error, ")

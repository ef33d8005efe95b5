"""``/openapi.json`` with every status, and ``/docs``.

Statuses follow from a route's middleware and dependencies: the guards of hosts and bodies, its
authentication, and whether it runs a prompt. ``/docs`` is one page without scripts, so it loads
nothing from elsewhere and can read no key.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from ostinato.protocol.answers import AnthropicErrorBody, ErrorBody
from ostinato.server.access.callers import require_administrator, require_caller
from ostinato.server.errors import ANTHROPIC_PATH

_REASONS = {
    400: "The request is invalid; the message names the parameter.",
    401: "No key was sent, or an unknown one.",
    403: "The key does not administer, or the request comes from a foreign page.",
    404: "There is no such model or object.",
    408: "The body took too long.",
    409: "It conflicts with what is running or stored.",
    413: "The body is too long.",
    429: "The server is full, or the key's limits are reached.",
    500: "The forward pass failed, or an internal error.",
    503: "The server is shutting down, or an administrator cancelled the request.",
}
_OF_ENGINE = ("/v1/", "/tokenize", "/detokenize", "/admin", "/metrics", "/reset_prefix_cache")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_EVENT = {
    "type": "object",
    "description": "One server-sent event.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}
_STREAMED = ("CompletionBody", "ChatBody", "ResponsesBody", "MessagesBody")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "As OpenAI's clients send it."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def install(app: FastAPI, routers: Sequence[APIRouter], has_keys: bool) -> None:
    """Add the OpenAPI description of these routers to an application."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, routers, has_keys)
        return app.openapi_schema

    async def docs() -> HTMLResponse:
        return HTMLResponse(_page(describe()), headers={"Content-Security-Policy": _POLICY})

    app.openapi = describe  # type: ignore[method-assign]  # as FastAPI's documentation does it
    app.add_api_route("/docs", docs, include_in_schema=False)


def _describe(app: FastAPI, routers: Sequence[APIRouter], has_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in (ErrorBody, AnthropicErrorBody):
        own = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= own.pop("$defs", {})
        schemas[model.__name__] = own
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = _SCHEMES
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                _complete(schema["paths"][route.path_format][method.lower()], route, has_keys)
    return schema


def _complete(operation: dict[str, Any], route: APIRoute, has_keys: bool) -> None:
    """Add authentication and errors to one operation."""
    if _depends_on(route.dependant, require_caller):
        operation["security"] = [{name: []} for name in _SCHEMES] + ([] if has_keys else [{}])
    else:
        operation["security"] = []
    model = AnthropicErrorBody if route.path.startswith(ANTHROPIC_PATH) else ErrorBody
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    responses = operation["responses"]
    responses.pop("422", None)
    for status in sorted(_statuses(route, has_keys)):
        described = responses.setdefault(str(status), {"description": _REASONS[status]})
        described.setdefault("content", body)
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if content.get("schema", {}).get("$ref", "").rpartition("/")[2] in _STREAMED:
        responses["200"]["content"] |= _EVENTS


def _statuses(route: APIRoute, has_keys: bool) -> set[int]:
    """Return the statuses of a route's errors."""
    dependant, statuses = route.dependant, set() if has_keys else {403}
    if _depends_on(dependant, require_caller):
        statuses |= {401}
    if _depends_on(dependant, require_administrator):
        statuses |= {403}
    if "GET" not in (route.methods or ()):
        statuses |= {400, 401, 408, 413, 429}
    if dependant.path_params or dependant.query_params or dependant.body_params:
        statuses |= {400, 404}
    if route.path.startswith(_OF_ENGINE):
        statuses |= {500, 503}
    if route.path.startswith(("/admin", "/reset")):
        statuses |= {409}
    return statuses


def _depends_on(dependant: Dependant, call: Any) -> bool:
    return dependant.call is call or any(_depends_on(d, call) for d in dependant.dependencies)


def _page(schema: dict[str, Any]) -> str:
    """Render the description as a page of plain HTML."""
    rows = [
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f"{escape(operation.get('summary', ''))}</summary>"
        f"<p>{escape(operation.get('description', ''))}</p>{_fields(schema, operation)}"
        f"<p>Statuses: {escape(', '.join(operation['responses']))}</p></details>"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    head = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{head}</title>"
        "<style>body{font:16px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "details{margin:.5rem 0}li{margin:.2rem 0}</style>"
        f"<h1>{head}</h1><p><a href=/openapi.json>openapi.json</a></p>{''.join(rows)}</html>"
    )


def _fields(schema: dict[str, Any], operation: dict[str, Any]) -> str:
    """List the fields of an operation's body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    fields = schema["components"]["schemas"].get(name, {}).get("properties", {})
    rows = (
        f"<li><code>{escape(field)}</code> {escape(about.get('description', ''))}"
        for field, about in fields.items()
    )
    return f"<ul>{''.join(rows)}</ul>" if fields else ""

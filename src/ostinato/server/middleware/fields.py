"""Fields of requests that have no effect here: named in a header, counted, or refused.

A response names unknown fields, and tools that are left out of the prompt, in the header
``x-ostinato-ignored-fields``; ``/metrics`` counts them. The header ``x-ostinato-set-aside`` names
the rules by which texts of the prompt were replaced by constants, and ``x-ostinato-ledger`` counts
the earlier answers that stand in the prompt as they were written.
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from ostinato.engine.ledger.continuation import TurnReport
from ostinato.protocol.conversation import Message
from ostinato.protocol.dialects import ApiBody, unused_fields
from ostinato.protocol.volatile import Settled
from ostinato.server.errors import ApiError
from ostinato.server.state import ServerState

HEADERS = {
    "ignored_fields": "x-ostinato-ignored-fields",
    "set_aside": "x-ostinato-set-aside",
    "ledger": "x-ostinato-ledger",
}
"""Headers by the attribute of the request's state that has their parts."""

_MAX_NAME_CHARS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def accept_fields(request: Request, state: ServerState, body: ApiBody) -> None:
    """Decide about the fields of a body that are not obeyed; the response will name those ignored.

    Raises:
        ApiError: A field would change the answer, or ``strict_fields`` is set and one is unknown.
    """
    left_out = body.left_out()
    fields = unused_fields(body, left_out)
    for place, instead in fields.refused:
        raise ApiError(
            400,
            f"{_shown(place)}: not supported, and leaving it out would change the answer: "
            f"{instead}",
            param=_shown(place),
            code="unsupported_parameter",
        )
    if fields.unknown and state.config.strict_fields:
        place = _shown(fields.unknown[0])
        raise ApiError(
            400,
            f"{place}: unknown parameter; this server does not know it, and refuses such fields "
            "because it runs with --strict-fields",
            param=place,
            code="unknown_parameter",
        )
    ignored = [*map(_shown, fields.unknown), *left_out]
    if ignored:
        request.app.state.metrics.ignored_fields(body.dialect.path, len(ignored))
        request.state.ignored_fields = ignored


def show_report(request: Request, report: TurnReport | None) -> None:
    """Have the response tell what the ledger of turns did to the prompt; zeros are left out."""
    if report is not None:
        counts = {
            "turns": report.num_turns,
            "restored": report.num_restored,
            "restored-tokens": report.num_restored_tokens,
            "restored-reasoning": report.num_reasoning,
            "listed-calls": report.num_listed,
            "dropped-reasoning": len(report.dropped),
            "unequal": report.num_unequal,
            "seals": report.num_seals,
            "ignored-seals": report.num_ignored_seals,
        }
        request.state.ledger = [f"{name}={count}" for name, count in counts.items() if count]


async def set_aside(
    request: Request, state: ServerState, salt: str, messages: Sequence[Message]
) -> Settled:
    """Replace what rules name in a conversation; the response will name the rules.

    Args:
        request: The request.
        state: Server state.
        salt: Of the tenant with whose turn the work is done.
        messages: For chat templates.
    """
    stabiliser = state.stabiliser
    if stabiliser.roles.isdisjoint([message["role"] for message in messages]):
        return Settled([*messages])  # no rule reads any of them
    settled = await state.llm.tokenizing.run(lambda: stabiliser.settle(messages), salt)
    request.app.state.metrics.set_aside(settled.counts, settled.late)
    request.state.set_aside = list(settled.counts)
    return settled


def _shown(place: str) -> str:
    """Return a place as it may stand in a header; an empty one would leave a space at its end."""
    return _UNSAFE.sub("?", place[:_MAX_NAME_CHARS]) or "?"


class DialectRoute(APIRoute):
    """A route whose responses name the fields that were ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which then adds the header."""
        handle = super().get_route_handler()

        async def handle_and_name(request: Request) -> Response:
            response = await handle(request)
            for name, header in HEADERS.items():
                if places := getattr(request.state, name, ()):
                    response.headers[header] = ", ".join(places)
            return response

        return handle_and_name

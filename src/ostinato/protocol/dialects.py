"""The fields that clients of each API send, and what this server does with them.

====================  =====================================================================
obeyed                the fields of the bodies in this room
no effect             understood, and nothing here depends on them: accepted
refused               they would change the answer, and are not supported: 400
any other             accepted, counted, and named in a header of the response; with
                      ``strict_fields`` a 400
====================  =====================================================================

A place is written without positions: ``tools[].defer_loading``. Clients were read on the date
below; a newer one may send more.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel

from ostinato.protocol.body import OpenBody

READ_ON = "2026-11-28"
"""When the clients' fields were last compared with these tables."""

MAX_SHOWN_FIELDS = 16
"""Fields without effect that a response names at most."""

_POSITION = re.compile(r"\[\d+\]")
"""What ``tools[3].name`` has more than ``tools[].name``."""

_HOSTED = "the client's server would have to run it; nothing is added to the prompt"
_ONE_TIER = "there is one tier"
_HISTORY = "the history that the client sends is the prompt: nothing is cleared"
_AUTOMATIC = "every prefix is cached without it"
_ALL_SHOWN = "all tools are in the prompt from the first turn on, so that the prefix stays"
_TEXT_ALONE = "templates show the text alone"
_BOUND = "only max_tokens bounds an answer"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's fields, besides those that are obeyed.

    Attributes:
        path: The path of the API.
        no_effect: Places of fields that are understood and have no effect, with the reason.
        refused: Places of fields that would change the answer, with what to use instead.
    """

    path: str
    no_effect: Mapping[str, str]
    refused: Mapping[str, str]


_SAMPLED = {
    "service_tier": _ONE_TIER,
    "request_id": "ids are the server's",
    "prompt_cache_options.prewarm": _AUTOMATIC,
    "stream_options.include_obfuscation": "chunks have no padding",
}
_UNSAMPLED = {
    "typical_p": "use top_p or min_p",
    "mm_processor_kwargs": "the model's own processor is used",
}

CHAT = Dialect(
    "/v1/chat/completions",
    no_effect={
        **_SAMPLED,
        "store": "nothing is stored",
        "verbosity": "templates know no such variable; say it in the prompt",
        "prediction": "it would only make an answer faster",
        "web_search_options": _HOSTED,
        "tools[].cache_control": _AUTOMATIC,
        "tools[].function.cache_control": _AUTOMATIC,
        "messages[].tool_calls[].index": "calls are in order",
        "messages[].annotations": _TEXT_ALONE,
    },
    refused={
        **_UNSAMPLED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "answers are text",
        "chat_template": "the model has its own; chat_template_kwargs sets its variables",
        "documents": "put their text into a message",
        "echo": "use /v1/completions",
    },
)

COMPLETIONS = Dialect(
    "/v1/completions",
    no_effect=_SAMPLED,
    refused={
        **_UNSAMPLED,
        "suffix": "put what precedes and what follows into the prompt, as the model was trained",
    },
)

RESPONSES = Dialect(
    "/v1/responses",
    no_effect={
        "service_tier": _ONE_TIER,
        "client_metadata": "for the client's own server",
        "text.verbosity": "templates know no such variable; say it in the instructions",
        "max_tool_calls": "no tool is run here",
        "prompt_cache_options.prewarm": _AUTOMATIC,
        "reasoning.summary": "reasoning is sent in full",
        "reasoning.generate_summary": "reasoning is sent in full",
        "reasoning.context": _HISTORY,
        "stream_options.include_obfuscation": "chunks have no padding",
        "input[].content[].annotations": _TEXT_ALONE,
        "input[].content[].logprobs": _TEXT_ALONE,
        "tools[].defer_loading": _ALL_SHOWN,
        "tools[].tools[].defer_loading": _ALL_SHOWN,
        "tools[].output_schema": "templates show arguments alone",
        "tools[].tools[].output_schema": "templates show arguments alone",
    },
    refused={
        "conversation": "use previous_response_id",
        "prompt": "put the text into instructions and input",
        "context_management": "send a shorter input",
    },
)

MESSAGES = Dialect(
    "/v1/messages",
    no_effect={
        "context_management": _HISTORY,
        "service_tier": _ONE_TIER,
        "speed": "there is one speed",
        "inference_geo": "there is one place",
        "mcp_servers": _HOSTED,
        "container": _HOSTED,
        "betas": "there are no betas to switch on",
        "diagnostics": "for the client's own server",
        **{
            f"{place}cache_control.scope": "each key has a cache of its own"
            for place in ("", "system[].", "tools[].", "messages[].content[].")
        },
        "tools[].defer_loading": _ALL_SHOWN,
        "tools[].eager_input_streaming": "arguments stream as they are written",
        "tools[].input_examples": "templates show schemas alone",
        "tools[].allowed_callers": "only the model calls",
        "messages[].content[].caller": "only the model calls",
        "messages[].content[].citations": _TEXT_ALONE,
        "system[].citations": _TEXT_ALONE,
        "output_config.task_budget": _BOUND,
        # Counting takes the body of a message, and no more of it than the prompt depends on.
        **dict.fromkeys(
            ("max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "metadata"),
            "a prompt's length does not depend on it",
        ),
    },
    refused={},
)

_UNPOOLED = {
    "request_id": "ids are the server's",
    "embed_dtype": "numbers are float32, or their shortest decimals",
    "endianness": "base64 is little-endian",
    "add_special_tokens": "the tokenizer's own are added",
}

EMBEDDINGS = Dialect(
    "/v1/embeddings",
    no_effect=_UNPOOLED,
    refused={"mm_processor_kwargs": "images are read as the checkpoint says"},
)

SCORES = Dialect(
    "/v1/rerank",
    no_effect={**_UNPOOLED, "rank_fields": "a document's text is ranked"},
    refused={"mm_processor_kwargs": "texts alone are scored"},
)

DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, SCORES)


class ApiBody(OpenBody):
    """The body of a request to one of the APIs.

    Attributes:
        dialect: The API's other fields.
        id_prefix: What the ids of its responses begin with.
    """

    dialect: ClassVar[Dialect]
    id_prefix: ClassVar[str] = ""

    model: str

    def left_out(self) -> list[str]:
        """Return the places of parts that are understood, and that the prompt does not show."""
        return []


def unused_fields(
    body: ApiBody, left_out: Sequence[str] = ()
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the places of fields that are not obeyed.

    Those in no table, at most a few, and those that are refused, with what to use instead.

    Args:
        body: The parsed body.
        left_out: Places of parts that are not read, with all of their fields.

    Cost: one visit of each object of the body.
    """
    unknown, refused = [], []
    dialect, unread = body.dialect, tuple(map("{}.".format, left_out))
    for place in _extras(body, ""):
        if place.startswith(unread):
            continue
        general = _POSITION.sub("[]", place)
        if general in dialect.refused:
            refused.append((place, dialect.refused[general]))
        elif general not in dialect.no_effect:
            unknown.append(place)
    return unknown[:MAX_SHOWN_FIELDS], refused


def _extras(body: BaseModel, prefix: str) -> list[str]:
    """Return the places of all fields that no body in this room has."""
    extras = body.model_extra or {}
    places = [prefix + name for name in extras] if extras else []
    for name in body.model_fields_set - extras.keys():
        content = getattr(body, name)
        if isinstance(content, BaseModel):
            places += _extras(content, f"{prefix}{name}.")
        elif isinstance(content, list):
            for number, item in enumerate(content):
                if isinstance(item, BaseModel):
                    places += _extras(item, f"{prefix}{name}[{number}].")
    return places

"""The base class of request bodies."""

from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

ItemT = TypeVar("ItemT")


class _FirstErrorOnly(FailFast):
    """Pydantic's marker, as a value for unions."""

    __hash__ = object.__hash__


Items = Annotated[list[ItemT], _FirstErrorOnly()]
"""A list validated up to its first error: half a million errors take seconds to format."""

MAX_FIELDS = 256
MAX_MESSAGES = 8192


class Body(BaseModel):
    """A JSON object with known fields of strict types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Treat null as a missing field, as OpenAI's API does."""
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"an object of {len(body)} fields: at most {MAX_FIELDS} are looked at")
        if None not in body.values():
            return body
        return {name: value for name, value in body.items() if value is not None}


class OpenBody(Body):
    """A JSON object of a public API: other fields are kept aside, for ``dialects`` to judge."""

    model_config = ConfigDict(extra="allow")


_MEDIA = {
    **dict.fromkeys(("image_url", "image", "input_image", "image_file"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
    **dict.fromkeys(("video_url", "video", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Types of message parts that are not text, of all APIs."""


def _refuse_media(part: Any, taken: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    medium = _MEDIA.get(kind) if isinstance(kind, str) else None
    if medium is None or kind == taken or _is_text(part):
        return part
    raise PydanticCustomError(
        "unsupported_content",
        "a part of type {kind}: {medium} input is not supported, whatever the model; "
        "leave the part out, or give what it says as text{instead}",
        {
            "kind": repr(kind),
            "medium": medium,
            "instead": "; images are taken as image_url by /v1/chat/completions, as input_image by "
            "/v1/responses, and as image by /v1/messages, of users and in the results of tools"
            if medium == "image"
            else "",
        },
    )


def _is_text(part: dict[str, Any]) -> bool:
    """Whether a document of Anthropic's API holds texts, rather than a file."""
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


TextOrImageUrl = BeforeValidator(partial(_refuse_media, taken="image_url"))
"""Refuses parts other than text and images, and says what to use instead."""

TextOrInputImage = BeforeValidator(partial(_refuse_media, taken="input_image"))
"""Accepts images of OpenAI's responses API."""

TextOrImage = BeforeValidator(partial(_refuse_media, taken="image"))
"""Accepts Anthropic's images."""

"""What every body has in common."""

from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

ItemT = TypeVar("ItemT")


class _FirstErrorOnly(FailFast):
    """Pydantic's marker, as a value that may stand in unions."""

    __hash__ = object.__hash__


Items = Annotated[list[ItemT], _FirstErrorOnly()]
"""A list whose first wrong item is enough: half a million errors take seconds to write."""

MOST_FIELDS = 256
MOST_MESSAGES = 8192


class Body(BaseModel):
    """An object of JSON, whose fields are all known and of the right type."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Take null for a field that was left out, as OpenAI's API does."""
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_FIELDS:
            raise ValueError(
                f"an object of {len(body)} fields: at most {MOST_FIELDS} are looked at"
            )
        return {name: value for name, value in body.items() if value is not None}


_MEDIA = {
    **dict.fromkeys(("image_url", "image", "input_image", "image_file"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
    **dict.fromkeys(("video_url", "video", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Parts of messages that are not text, in the words of every API."""


def _refuse_media(part: Any, taken: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    medium = _MEDIA.get(kind) if isinstance(kind, str) else None
    if medium is None or kind == taken:
        return part
    raise PydanticCustomError(
        "unsupported_content",
        "a part of type {kind}: {medium} input is not served here, also by models that know it; "
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


TextOrImageUrl = BeforeValidator(partial(_refuse_media, taken="image_url"))
"""Refuses parts that are neither text nor images of OpenAI's chat, and says what to do instead."""

TextOrInputImage = BeforeValidator(partial(_refuse_media, taken="input_image"))
"""Lets images of OpenAI's responses pass."""

TextOrImage = BeforeValidator(partial(_refuse_media, taken="image"))
"""Lets Anthropic's images pass."""


def parts_of(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a content as chat templates read it: as one text, or as parts if it has images.

    Args:
        content: A text, or bodies with a method ``part`` that returns a part as OpenAI has it.
    """
    if isinstance(content, str):
        return content
    parts = [body.part() for body in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts

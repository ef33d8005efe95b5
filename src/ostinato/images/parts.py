"""Finds the images of a conversation.

An image is a part of a message's content: OpenAI's ``image_url``, or ``image`` with an object, a
URL or a data URI, as the chat templates of ``transformers`` name it. Templates are then given
``{"type": "image"}``, for which they write the model's placeholder.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ostinato.core.errors import RequestError

Message = Mapping[str, Any]

_IMAGE = {"type": "image"}


def images_in(messages: object) -> list[Any]:
    """Return the source of each image of a conversation, in order: a URL or an object.

    Raises:
        RequestError: A part has no image.
    """
    images = []
    for _, _, part in _parts(messages):
        images.append(_source(part))
    return images


def without_sources(messages: Sequence[Message]) -> list[Any]:
    """Return a conversation as chat templates read it: with ``_IMAGE`` for each image part."""
    written: list[Any] = list(messages)
    for place, number, _ in _parts(messages):
        content = list(written[place]["content"])
        content[number] = _IMAGE
        written[place] = {**written[place], "content": content}
    return written


def _parts(messages: object) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield each image part, with its message's place and its own in the message's content."""
    for place, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str):
            continue
        for number, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in ("image_url", "image"):
                yield place, number, part


def _source(part: Mapping[str, Any]) -> Any:
    source = part.get("image_url", part.get("image", part.get("url")))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None or source == "":
        raise RequestError(
            f"an image part without an image ({dict(part)!r:.80}): give "
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    return source

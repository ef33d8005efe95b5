"""Renders a conversation as a prompt, with the tokenizer's chat template.

With a template that keeps earlier turns unchanged, every turn is a prefix of the next, and hits.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.engine.requests.prompts import whole_characters

Message = Mapping[str, Any]
"""At least ``role`` and ``content``, as in OpenAI's API."""


def is_conversation(messages: object) -> bool:
    """Whether it is one conversation rather than a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return True  # ``render_text`` refuses it
    return bool(messages) and not isinstance(messages[0], Sequence)


def sections_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Name the texts of a conversation, in order, so that explanations can place a difference."""
    sections: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        name = f"messages[{place}] ({message['role']})"
        content = message.get("content")
        if isinstance(content, str):
            sections.append((name, content))
        elif isinstance(content, Sequence):
            parts = [part for part in content if isinstance(part, Mapping)]
            sections += [
                (name, part["text"]) for part in parts if isinstance(part.get("text"), str)
            ]
    return tuple(sections)


def render_chat(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> list[int]:
    """Write a conversation as token ids; as ``render_text``."""
    text = render_text(tokenizer, messages, **settings)
    # Not verbose: admission refuses a prompt that is too long.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_text(
    tokenizer: Any, messages: Sequence[Message], *, has_images: bool = False, **options: Any
) -> str:
    """Check a conversation, and write it as ``render_checked``.

    Args:
        tokenizer: Of ``transformers``.
        messages: In order; at least one.
        has_images: Whether ``{"type": "image"}`` stands for an image that is loaded.
        **options: Of ``render_checked``.

    Raises:
        RequestError: There is no message or no template, or the template refuses.
    """
    check_messages(messages, has_images)
    return render_checked(tokenizer, messages, **options)


def render_checked(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Write a conversation that ``check_messages`` accepts as the text of a prompt.

    Args:
        tokenizer: Of ``transformers``.
        messages: In order; at least one.
        add_generation_prompt: Whether to open the assistant's turn.
        chat_template: Jinja; None is the tokenizer's own.
        tools: Functions that the model may call, in OpenAI's form; a template without tools leaves
            them out.
        **options: More arguments of ``apply_chat_template``: ``continue_final_message``, and what
            the template itself reads, such as ``enable_thinking``.

    Raises:
        RequestError: There is no template, or it refuses.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: give chat_template, or use generate()"
        )
    template = chat_template or str(tokenizer.chat_template)
    if "image" in template and _reads_parts_only(tokenizer, template):
        messages = _in_parts(messages)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat_template,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **options,
            tokenize=False,
        )
    except Exception as error:  # a template may raise anything
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return whole_characters("messages", str(text))


def check_messages(messages: Any, has_images: bool = False) -> None:
    """Raise ``RequestError`` for what is no conversation, or has media that were not loaded."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f"a conversation must be a list of messages, not {type(messages).__name__} "
            f"({messages!r:.80})"
        )
    if not messages:
        raise RequestError("messages is empty: a conversation needs at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise RequestError(
                f"message {position} is {message!r:.80}: it needs a 'role' and a 'content'"
            )
        if not isinstance(message["content"], str):
            _check_parts(position, message["content"], has_images)


def _check_parts(position: int, content: object, has_images: bool) -> None:
    """Refuse media that were not loaded: a template would write their place, empty."""
    for part in content if isinstance(content, Sequence) else ():
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if has_images and part == {"type": "image"}:
            continue
        if any(medium in kind for medium in ("image", "audio", "video")):
            raise RequestError(
                f"message {position} has a part of type {kind!r}, of which nothing is loaded here: "
                "images are taken by chat(), audio and video are not served; leave the part out"
            )


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that knows contents only as parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


@lru_cache(maxsize=16)
def _reads_parts_only(tokenizer: Any, template: str) -> bool:
    """Whether a template leaves out a content that is a text."""
    messages = [{"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # a template may raise anything
        return True
    return _MARK not in text


_MARK = "a content as text"

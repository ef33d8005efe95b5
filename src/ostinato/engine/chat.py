"""Renders a conversation as a prompt, with the tokenizer's chat template.

With a template that keeps earlier turns unchanged, every turn is a prefix of the next, and hits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.engine.prompts import whole_characters

Message = Mapping[str, Any]
"""At least ``role`` and ``content``, as in OpenAI's API."""


def is_conversation(messages: object) -> bool:
    """Whether it is meant as one conversation rather than as a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return True  # and none that can be rendered
    return bool(messages) and not isinstance(messages[0], Sequence)


def sections_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Name the texts of a conversation, in order, so that a difference can be placed."""
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
    # Not verbose: that it is too long is for admission to say.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Write a conversation as the text of a prompt, special tokens included.

    Args:
        tokenizer: Of ``transformers``.
        messages: In order; at least one.
        chat_template: Jinja; None is the tokenizer's own.
        add_generation_prompt: Whether to open the assistant's turn.
        tools: Functions to tell the model of, in OpenAI's form; a template that knows none leaves
            them out.
        **options: More arguments of ``apply_chat_template``: ``continue_final_message``, and what
            the template itself reads, such as ``enable_thinking``.

    Raises:
        RequestError: There is no message or no template, or the template refuses.
    """
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
        _check_is_text(position, message["content"])
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: give chat_template, or use generate()"
        )
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


def _check_is_text(position: int, content: object) -> None:
    """Refuse images and sound: a template would write their place into the text, empty."""
    for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if any(medium in kind for medium in ("image", "audio", "video")):
            raise RequestError(
                f"message {position} has a part of type {kind!r}: only text is served, also by "
                "models that know images; leave the part out or describe it in words"
            )

"""Parses prompts: a text, a row of token ids, or a dict with one of them and cache options.

Lists of those are batches. ``"To be"`` and ``[5, 6, 7]`` are one prompt each, ``["To be"]``
and ``[[5, 6, 7]]`` are batches of one, and ``[]`` is a batch of none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ostinato.core.errors import RequestError
from ostinato.engine.ledger.continuation import TurnReport
from ostinato.engine.ledger.turns import OpenTurn
from ostinato.engine.text.known_texts import TokenizedText

TokenIds = Sequence[int]


class PromptDict(TypedDict, total=False):
    """A prompt with settings.

    Attributes:
        prompt: Its text; or
        prompt_token_ids: its ids.
        cache_salt: Only requests of the same salt share blocks.
        cache_read: False computes every token, whatever is cached.
        cache_write: False keeps nothing of it for other requests.
        public_prefixes: Names of published prefixes that it may begin with; ``"*"`` is all.
        adapter: Name of a loaded LoRA adapter; empty for the base model.
        keep_tokens: False tokenizes all of the text, including what the model generated.
        sections: Names and texts of its messages and fields, in order; for explanations.
        multi_modal_data: ``{"image": ...}``: an image or a list of them, in the order of their
            placeholders; each a ``PIL.Image``, an RGB array of uint8, or a file's bytes.
        report: What the ledger of turns did to it, as the engine rendered it; for explanations.
    """

    prompt: str
    prompt_token_ids: TokenIds
    cache_salt: str
    cache_read: bool
    cache_write: bool
    public_prefixes: Sequence[str]
    adapter: str
    keep_tokens: bool
    sections: Sequence[tuple[str, str]]
    multi_modal_data: Mapping[str, Any]
    report: TurnReport | None


TextPrompt = TokensPrompt = PromptDict
"""Names of vLLM's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, parsed; ``PromptDict`` describes most of its fields.

    Attributes:
        text: As given; None for token ids.
        token_ids: As given; None for a text.
        publishes: Name of the public prefix that it is computed for; usually None.
        known: Its text with its tokens, if they are known to belong together.
        images: In the order of their placeholders.
        keep_reasoning: Whether a conversation keeps reasoning that its template drops: ``always``
            or ``template``; None is the engine's setting.
        begun: Where its answer is noted in the ledger; None if it is not.
        report: What the ledger did to it.
    """

    text: str | None = None
    token_ids: TokenIds | None = None
    cache_salt: str = ""
    cache_read: bool = True
    cache_write: bool = True
    public_prefixes: tuple[str, ...] = ()
    adapter: str = ""
    publishes: str | None = None
    keep_tokens: bool = True
    sections: tuple[tuple[str, str], ...] = ()
    known: TokenizedText | None = None
    images: tuple[Any, ...] = ()
    keep_reasoning: str | None = None
    begun: OpenTurn | None = None
    report: TurnReport | None = None


PromptInput = str | TokenIds | PromptDict | Prompt

PromptType = PromptInput
"""vLLM's name."""


def parse_prompts(prompts: PromptInput | Iterable[PromptInput]) -> list[Prompt]:
    """Parse one prompt or a batch of them.

    Raises:
        RequestError: Something is not a prompt.
    """
    if isinstance(prompts, (str, dict, Prompt)) or _is_one_row(prompts):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Iterable) or (isinstance(prompts, np.ndarray) and not prompts.ndim):
        raise RequestError(_unknown(prompts))
    return [parse_prompt(prompt) for prompt in prompts]


def parse_prompt(prompt: Any) -> Prompt:
    """Parse one prompt.

    Raises:
        RequestError: It is neither a text, nor token ids, nor a dict with one of them.
    """
    if isinstance(prompt, Prompt):
        check_salt(prompt.cache_salt)
        if prompt.text is not None:
            whole_characters("prompt", prompt.text)
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=whole_characters("prompt", prompt))
    if isinstance(prompt, dict):
        return _parse_dict(prompt)
    if _may_hold_ids(prompt):
        return Prompt(token_ids=prompt, known=_known_text(prompt))
    raise RequestError(_unknown(prompt))


def check_salt(cache_salt: object) -> None:
    """Raise ``RequestError`` for what cannot name a tenant: no text, or half of a character."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt={cache_salt!r}: must be a str")
    whole_characters("cache_salt", cache_salt)


def check_keep_reasoning(choice: str | None) -> str | None:
    """Return a choice of ``KeepReasoning``, or None; others raise ``RequestError``."""
    if choice not in (None, "template", "always"):
        raise RequestError(f"keep_reasoning={choice!r:.80}: must be 'template' or 'always'")
    return choice


def _parse_dict(prompt: dict[str, Any]) -> Prompt:
    unknown = set(prompt) - set(PromptDict.__annotations__)
    if unknown:
        raise RequestError(
            f"unknown prompt key {min(unknown, key=str)!r}: known are "
            f"{', '.join(PromptDict.__annotations__)}"
        )
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError("a prompt dict needs one of 'prompt' and 'prompt_token_ids'")
    check_salt(prompt.get("cache_salt", ""))
    for name in ("cache_read", "cache_write", "keep_tokens"):
        if not isinstance(prompt.get(name, True), bool):
            raise RequestError(f"{name}={prompt[name]!r}: must be a bool")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if "prompt" in prompt and not isinstance(text, str):
        raise RequestError(f"prompt={text!r:.80}: must be a text")
    if "prompt_token_ids" in prompt and not _may_hold_ids(token_ids):
        raise RequestError(f"prompt_token_ids={token_ids!r:.80}: must be a list of token ids")
    whole_characters("prompt", prompt.get("prompt", ""))
    if not isinstance(prompt.get("adapter", ""), str):
        raise RequestError(f"adapter={prompt['adapter']!r:.80}: must be a name")
    if not isinstance(prompt.get("report"), (TurnReport, type(None))):
        raise RequestError(f"report={prompt['report']!r:.80}: must be of a rendered conversation")
    as_given = ("cache_salt", "cache_read", "cache_write", "keep_tokens", "adapter", "report")
    return Prompt(
        text=text,
        token_ids=token_ids,
        public_prefixes=_parse_names(prompt.get("public_prefixes", ())),
        sections=_parse_sections(prompt.get("sections", ())),
        known=_known_text(token_ids),
        images=_parse_images(prompt.get("multi_modal_data", {})),
        **{name: prompt[name] for name in as_given if name in prompt},
    )


def _known_text(token_ids: object) -> TokenizedText | None:
    """Return ids as a text with its tokens, if that is what they are."""
    return token_ids if isinstance(token_ids, TokenizedText) else None


def _parse_names(names: Any) -> tuple[str, ...]:
    is_row = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_row or not all(isinstance(name, str) for name in names):
        raise RequestError(f"public_prefixes={names!r:.80}: must be a list of names")
    return tuple(names)


def _parse_sections(sections: Any) -> tuple[tuple[str, str], ...]:
    is_row = isinstance(sections, Sequence) and not isinstance(sections, str)
    pairs = [tuple(field) for field in sections] if is_row else [()]
    if any([type(part) for part in pair] != [str, str] for pair in pairs):
        raise RequestError(f"sections={sections!r:.80}: must be pairs of a name and a text")
    return tuple(pairs)


def _parse_images(data: Any) -> tuple[Any, ...]:
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError(
            f"multi_modal_data={data!r:.80}: must be a dict with 'image', an image or a list of "
            "them; audio and video are not served"
        )
    images = data.get("image")
    if images is None:
        return ()
    return tuple(images) if isinstance(images, (list, tuple)) else (images,)


def _is_one_row(prompts: object) -> bool:
    """Whether it is one row of ids rather than a batch."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence) or not len(prompts):
        return False
    return not isinstance(prompts[0], (str, dict, Sequence, np.ndarray))


def _may_hold_ids(row: object) -> bool:
    """Whether it is a row of something; bytes and texts are rows of something else."""
    is_row = isinstance(row, (Sequence, np.ndarray))
    return is_row and not isinstance(row, (str, bytes, bytearray, memoryview))


def whole_characters(name: str, text: str) -> str:
    """Return a text, unless it holds half of a character, which no tokenizer knows.

    Raises:
        RequestError: Naming the position, as Python's strings may hold surrogates, also from JSON;
            or it is no text.
    """
    if not isinstance(text, str):
        raise RequestError(f"{name}={text!r:.80}: must be a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RequestError(
            f"{name}={text!r:.80}: {half!r} at position {error.start} is half a character; "
            "was the text cut between two surrogates?"
        ) from error
    return text


def _unknown(prompt: object) -> str:
    return (
        f"a prompt must be a text, a list of token ids or a dict, not {type(prompt).__name__} "
        f"({prompt!r:.80})"
    )

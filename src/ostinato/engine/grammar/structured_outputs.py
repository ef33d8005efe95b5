"""Structured outputs: a constraint on the output's text, such as a JSON schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ostinato.engine.settings.keywords import Unsupported, accepts_vllm_keywords
from ostinato.errors import InvalidSamplingParams

_KINDS = ("json", "json_object", "regex", "choice", "grammar")

MAX_SOURCE_CHARACTERS = 200_000
"""Longest schema, regex or grammar: it is compiled before the request is admitted."""

MAX_AFTER_CHARACTERS = 1_000
"""Longest expression after which a constraint applies."""


UNSUPPORTED_STRUCTURED: Mapping[str, Unsupported] = {
    "disable_fallback": Unsupported("there is one backend", (False, True)),
    "disable_any_whitespace": Unsupported("write the schema as a grammar", (False,)),
    "disable_additional_properties": Unsupported(
        "set additionalProperties to false in the schema", (False,)
    ),
    "whitespace_pattern": Unsupported("write the schema as a grammar"),
    "structural_tag": Unsupported("set after, or write a grammar"),
}
"""Keywords of vLLM's ``StructuredOutputsParams`` that have no counterpart here."""


@accepts_vllm_keywords(UNSUPPORTED_STRUCTURED, InvalidSamplingParams)
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the output: exactly one of these, with vLLM's names.

    Attributes:
        json: A JSON schema, as a mapping or as its text.
        json_object: Any JSON object.
        regex: A regular expression that the whole text matches, in the syntax of Rust's ``regex``
            crate: no look-around, no back references.
        choice: The text is one of these.
        grammar: A context-free grammar, in Lark's or llama.cpp's (GBNF) notation.
        after: A regular expression of Python; the constraint applies after its first match, for
            models that reason first. None applies it at once.
        opening: With ``after``, the one token that begins the unconstrained part; an output that
            does not begin with it is constrained at once. None begins unconstrained.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | None = None
    opening: str | None = None

    def __post_init__(self) -> None:
        """Check the constraint, and turn a schema into text.

        Raises:
            InvalidSamplingParams: Not exactly one constraint is given, or it is of the wrong type,
                or too long.
        """
        names = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            raise InvalidSamplingParams(
                f"structured_outputs has {' and '.join(names) or 'nothing'}: give one of "
                f"{', '.join(_KINDS)}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if not isinstance(self.json_object, bool):
            raise InvalidSamplingParams(
                f"structured_outputs.json_object={self.json_object!r:.80}: must be a bool"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidSamplingParams(
                    f"structured_outputs.{name}={value!r:.80}: must be a text"
                )
        _check_text(self.kind, self.source)
        if self.after is not None:
            _check_after(self.after)

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The constraint as text; with ``kind`` it identifies it."""
        if self.choice is not None:
            return json.dumps(list(self.choice), ensure_ascii=False)
        return str(self.json or self.regex or self.grammar or "")


StructuredOutputsParams = StructuredOutputs
"""vLLM's name of it."""


def _schema(schema: Any) -> str:
    """Return a schema's text."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidSamplingParams(
            f"structured_outputs.json={schema!r:.80}: is no JSON: {error}"
        ) from error
    if not isinstance(value, Mapping):
        raise InvalidSamplingParams(
            f"structured_outputs.json={schema!r:.80}: a JSON schema is an object"
        )
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    """Return the texts to choose from."""
    is_row = isinstance(choice, Sequence) and not isinstance(choice, (str, bytes))
    if not is_row or not choice or not all(isinstance(c, str) and c for c in choice):
        raise InvalidSamplingParams(
            f"structured_outputs.choice={choice!r:.80}: must be a list of texts, at least one, "
            "and none of them empty"
        )
    return tuple(choice)


def _check_after(after: str) -> None:
    if not isinstance(after, str) or len(after) > MAX_AFTER_CHARACTERS:
        raise InvalidSamplingParams(
            f"structured_outputs.after={after!r:.80}: must be a text of at most "
            f"{MAX_AFTER_CHARACTERS} characters: it is looked for after each token"
        )
    try:
        regex.compile(after)
    except regex.error as error:
        raise InvalidSamplingParams(
            f"structured_outputs.after={after!r:.80}: is no expression: {error}"
        ) from error


def _check_text(kind: str, source: str) -> None:
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise InvalidSamplingParams(
            f"structured_outputs.{kind} has {len(source)} characters: at most "
            f"{MAX_SOURCE_CHARACTERS} are compiled; make it shorter"
        )
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise InvalidSamplingParams(
            f"structured_outputs.{kind} has half of a character at position {error.start}"
        ) from error

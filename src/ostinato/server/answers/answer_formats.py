"""Formats in which model families write reasoning and tool calls, one row per family.

A row defines how the parts of an answer begin and end. Expressions are matched as text arrives
(``answer_parser``); their groups name what begins there: ``call``, ``whole`` (a call that is parsed
once it is complete), ``text``, ``reasoning``, or ``skip`` (a mark without meaning).

Sources: the families' chat templates. Hermes 2 Pro and Qwen 2.5 (``hermes``), Llama 3.1
(``llama3_json``), mistral-common (``mistral``), DeepSeek V3 (``deepseek_v3``), and OpenAI's harmony
format (``openai``); the names of the rows are vLLM's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2.exceptions import TemplateError

from ostinato.core.errors import ConfigError

_JSON_CALL = (
    r'\{\s{0,64}(?:"type"\s{0,9}:\s{0,9}"function"\s{0,9},\s{0,64})?"name"\s{0,9}:\s{0,9}'
    r'"(?P<name>[^"\\]{1,256})"\s{0,9},\s{0,64}"(?:arguments|parameters)"\s{0,9}:\s{0,9}(?=\{)'
)
"""The common form of a call: the name, then an object."""

_NAME = r"(?P<name>[\w.:-]{1,128})"
_IN_HEADER = r"(?:(?!<\|(?:message|end|start)\|>)[^\n]){0,200}?"
_HEADER = r"<\|(?:start|channel)\|>"
_FUNCTION, _SEP = "function<｜tool▁sep｜>", "<｜tool▁sep｜>"
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

Group = tuple[str, str]
"""What begins, and the expression that begins it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        anywhere: Expressions that may match anywhere in the text.
        first: Expressions that may match only at the beginning of the answer.
        following: Expressions that may match only right after a call.
        tail: What follows the arguments of a call and belongs to it.
        closes: Text that ends a call; may be empty.
        written: Template of a call, with ``NAME`` and ``ARGUMENTS``.
        opens: The beginning of ``written`` that commits a model to a call; empty: all of it.
        group: Text before the first call, and after the last one.
        separator: Text between calls; None where there is at most one call.
        marks: Marks that may be special tokens.
        knows: Whether a chat template shows calls in this format.
        has_short_ids: Whether its template requires call ids of nine letters or digits.
        takes_text: Whether its template expects the arguments of earlier calls as text.
    """

    anywhere: tuple[Group, ...] = ()
    first: tuple[Group, ...] = ()
    following: tuple[Group, ...] = ()
    tail: str
    closes: str = ""
    written: str
    opens: str = ""
    group: tuple[str, str] = ("", "")
    separator: str | None = "\n"
    marks: tuple[str, ...] = ()
    knows: Callable[[str], bool]
    has_short_ids: bool = False
    takes_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A format of reasoning.

    Attributes:
        begins: What begins reasoning, at the beginning of the answer.
        ends: What ends it.
        frames: What begins each part, anywhere; then nothing else is matched.
        opening: The text of ``begins``; a template may end a prompt with it.
        closing: The text of ``ends``; a template may end a prompt with it, to skip reasoning.
        is_assumed: Whether answers begin with reasoning without a mark.
        before_text: Expression after which the answer's grammar applies; may be empty.
    """

    begins: str = ""
    ends: str = ""
    frames: tuple[Group, ...] = ()
    opening: str = ""
    closing: str = ""
    is_assumed: bool = False
    before_text: str = ""


def _tags(opening: str, closing: str, **more: Any) -> ReasoningFormat:
    begins, ends = (text.replace("[", r"\[") for text in (opening, closing))
    return ReasoningFormat(
        begins=begins, ends=ends, opening=opening, closing=closing,
        before_text=ends, **more,
    )  # fmt: skip


REASONING_FORMATS = {
    "qwen3": _tags("<think>", "</think>"),
    "deepseek_r1": _tags("<think>", "</think>", is_assumed=True),
    "mistral": _tags("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat(
        begins="Here(?:'s| is) my thought process:", ends="Here(?:'s| is) my response:"
    ),
    "openai_gptoss": ReasoningFormat(
        frames=(
            ("reasoning", rf"{_HEADER}{_IN_HEADER}analysis{_IN_HEADER}<\|message\|>"),
            ("text", rf"{_HEADER}{_IN_HEADER}<\|message\|>"),
            ("skip", r"<\|(?:end|return|call)\|>"),
        ),
        closing="<|end|>",
        before_text=r"<\|channel\|>final[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>",
    ),
}
"""By the names of ``--reasoning-parser``."""

_HERMES = ToolFormat(
    anywhere=(
        ("call", rf"<tool_call>\s{{0,64}}{_JSON_CALL}"),
        ("whole", r"<tool_call>(?P<body>(?:(?!</tool_call>)[\s\S]){0,4096}+)</tool_call>"),
    ),
    tail=r"[\s\S]{0,256}?</tool_call>",
    closes="</tool_call>",
    written='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    opens="<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    knows=lambda template: "<tool_call>" in template and "<function=" not in template,
)

_LLAMA = ToolFormat(
    anywhere=(("call", rf"<\|python_tag\|>\s{{0,64}}{_JSON_CALL}"),),
    first=(("call", rf"\s{{0,64}}{_JSON_CALL}"),),
    following=(("call", rf"\s{{0,64}};?\s{{0,64}}{_JSON_CALL}"),),
    tail=r"\s{0,64}\}",
    written='{"name": "NAME", "parameters": ARGUMENTS}',
    separator="; ",
    marks=("<|python_tag|>",),
    knows=lambda template: "<|python_tag|>" in template,
)

_MISTRAL = ToolFormat(
    anywhere=(
        ("call", rf"\[TOOL_CALLS\]\s{{0,64}}\[?\s{{0,64}}{_JSON_CALL}"),
        (
            "call",
            rf"\[TOOL_CALLS\]\s{{0,9}}{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s{{0,9}}(?=\{{)",
        ),
    ),
    following=(("call", rf"\s{{0,64}}{_JSON_CALL}"),),
    tail=r"\s{0,64}\}\s{0,64}[\],]",
    written='{"name": "NAME", "arguments": ARGUMENTS}',
    opens="[TOOL_CALLS]",
    group=("[TOOL_CALLS][", "]"),
    separator=", ",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    knows=lambda template: "[TOOL_CALLS]" in template,
    has_short_ids=True,
)

_MISTRAL_ARGS = replace(
    _MISTRAL, written="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", group=("", ""), separator=""
)
"""As templates with ``[ARGS]`` write it, of Mistral Small 3.2 and later."""

_DEEPSEEK = ToolFormat(
    anywhere=(
        (
            "call",
            rf"(?:{_CALLS_BEGIN}\s{{0,9}})?{_CALL_BEGIN}(?:{_FUNCTION})?{_NAME}\s{{0,9}}"
            rf"(?:{_SEP}|```json)\s{{0,9}}(?=\{{)",
        ),
        ("skip", _CALLS_END),
    ),
    tail=rf"[\s\S]{{0,64}}?{_CALL_END}",
    closes=_CALL_END,
    written=f"{_CALL_BEGIN}{_FUNCTION}NAME\n```json\nARGUMENTS\n```{_CALL_END}",
    opens=_CALLS_BEGIN,
    group=(_CALLS_BEGIN, _CALLS_END),
    marks=(_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEP),
    knows=lambda template: _CALL_BEGIN in template,
    takes_text=True,
)

_OPENAI = ToolFormat(
    anywhere=(
        (
            "call",
            rf"{_HEADER}{_IN_HEADER} to=functions\.{_NAME}{_IN_HEADER}<\|message\|>",
        ),
    ),
    tail=r"<\|call\|>",
    closes="<|call|>",
    written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
    opens="<|channel|>commentary to=functions.",
    separator=None,
    marks=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    knows=lambda template: "<|channel|>" in template,
)

TOOL_FORMATS = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK,
    "openai": _OPENAI,
}
"""By the names of ``--tool-call-parser``."""

_AUTO = ("openai", "mistral", "deepseek_v3", "llama3_json", "hermes")
"""In the order in which chat templates are searched: the least ambiguous marks first."""


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of one model's answers.

    Attributes:
        tools: Format of calls.
        reasoning: Format of reasoning; None leaves it in the text.
        is_native: Whether the chat template shows tools and calls in that format.
        special_ids: Marks of both that are special tokens, and their ids.
        mark_ids: Marks of both that are one token, special or not, and their ids.
        closing_ids: How the end of reasoning is tokenized.
        takes_later_systems: Whether the chat template shows a system message in the middle.
    """

    tools: ToolFormat = _HERMES
    reasoning: ReasoningFormat | None = None
    is_native: bool = False
    special_ids: dict[str, int] = field(default_factory=dict, hash=False)
    mark_ids: dict[str, int] = field(default_factory=dict, hash=False)
    closing_ids: tuple[int, ...] = ()
    takes_later_systems: bool = True

    @classmethod
    def of(
        cls, tokenizer: Any, tool_parser: str = "auto", reasoning_parser: str | None = None
    ) -> "AnswerFormats":
        """Return the formats of a model.

        Args:
            tokenizer: The model's; None if it has none.
            tool_parser: A key of ``TOOL_FORMATS``, or ``auto``: from the chat template.
            reasoning_parser: A key of ``REASONING_FORMATS``, or None.

        Raises:
            ConfigError: The chat template shows no tools, and the format needs one that does.
        """
        template = str(getattr(tokenizer, "chat_template", None) or "")
        shows_tools = "tools" in template
        names = _AUTO if tool_parser == "auto" else (tool_parser,)
        known = [TOOL_FORMATS[name] for name in names if TOOL_FORMATS[name].knows(template)]
        tools = known[0] if known and shows_tools else TOOL_FORMATS[names[-1]]
        if tools is not _HERMES and not shows_tools:
            raise ConfigError(
                f"tool_call_parser={tool_parser!r}: the model's chat template shows no tools; "
                "choose 'hermes', whose calls are described to the model in words"
            )
        # Other formats are not checked: templates may build marks from pieces.
        is_native = shows_tools and (tools is not _HERMES or bool(known))
        if tools is _MISTRAL and "[ARGS]" in template:
            tools = _MISTRAL_ARGS
        reasoning = None if reasoning_parser is None else REASONING_FORMATS[reasoning_parser]
        marks = {
            *tools.marks,
            *(() if reasoning is None else (reasoning.opening, reasoning.closing)),
        }
        special = _special_ids(tokenizer, sorted(marks - {""}))
        single = _mark_ids(tokenizer, sorted(marks - {""}))
        closing = () if reasoning is None else _encode(tokenizer, reasoning.closing)
        later = _takes_later_systems(tokenizer)
        return cls(tools, reasoning, is_native, special, single | special, closing, later)


_PROBE = (
    {"role": "system", "content": "first"},
    {"role": "user", "content": "question"},
    {"role": "system", "content": "later note"},
)


def _takes_later_systems(tokenizer: Any) -> bool:
    """Whether the template renders a system message that is not the first; tried once, at load."""
    if not getattr(tokenizer, "chat_template", None):
        return True
    try:
        text = tokenizer.apply_chat_template(list(_PROBE), tokenize=False)
    except TemplateError:  # "System message must be at the beginning."
        return False
    return "later note" in text


def _special_ids(tokenizer: Any, marks: list[str]) -> dict[str, int]:
    """Return the ids of the marks that decoding skips by default."""
    if tokenizer is None or not marks:
        return {}
    ids = zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True)
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    return {mark: int(id_) for mark, id_ in ids if id_ in special or _hides(tokenizer, mark, id_)}


def _mark_ids(tokenizer: Any, marks: list[str]) -> dict[str, int]:
    """Return the ids of the marks that the tokenizer has one added token for."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: int(id_) for id_, token in added.items() if token.content in marks}


def _hides(tokenizer: Any, mark: str, id_: int | None) -> bool:
    """Whether an added token is special although it has no role."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(id_)
    return added is not None and bool(added.special) and added.content == mark


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if tokenizer is None or not text:
        return ()
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

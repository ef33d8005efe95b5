"""Sampling parameters of a body, with the grammar for its response format and its tools."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.engine.grammar.grammar import JSON_WHITE_SPACE
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.grammar.thinking_budget import ThinkingBudget
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.errors import InvalidSamplingParams
from ostinato.protocol.chat import ChatBody
from ostinato.protocol.completions import CompletionBody
from ostinato.protocol.conversation import Tool, ToolUse
from ostinato.protocol.messages import MessagesBody
from ostinato.protocol.responses import ResponsesBody
from ostinato.protocol.schemas import closed
from ostinato.server.answers.answer_formats import AnswerFormats

_MAX_CALLS = 16
"""Most parallel calls where a call is required: a model could go on forever."""

_SPACING = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
"""Options for ``llguidance``, as in structured outputs."""


ConversationBody = ChatBody | MessagesBody | ResponsesBody
"""A body with tools, whose answers may have a format."""

SampledBody = CompletionBody | ConversationBody
"""A body that says how its answer is sampled."""


def sampling_params(body: SampledBody) -> SamplingParams:
    """Return the sampling parameters of a body.

    Raises:
        InvalidSamplingParams: A value is out of range.
    """
    form = body.form()
    structured = None if form is None else StructuredOutputs(**form)
    return SamplingParams(**body.sampler(), structured_outputs=structured)


def chat_params(body: ConversationBody, formats: AnswerFormats) -> SamplingParams:
    """Return the sampling parameters of a chat; calls are written in the model's format.

    Raises:
        InvalidSamplingParams: A value is out of range.
        RequestError: The tools contradict each other.
    """
    params, form = sampling_params(body), body.answer_form()
    answer = None if form is None else StructuredOutputs(**form)
    if (num_tokens := body.thinking_tokens()) is not None:
        params = bound_thinking(params, num_tokens, formats, body.BUDGET_IS_HINT)
    return constrain(params, answer, body.tool_use, formats, body.ANSWER_FIELD)


def bound_thinking(
    params: SamplingParams, num_tokens: int, formats: AnswerFormats, is_hint: bool = False
) -> SamplingParams:
    """Return sampling parameters that end the reasoning after a number of tokens.

    Args:
        params: Parameters without a budget.
        num_tokens: The budget.
        formats: The model's formats.
        is_hint: Whether clients send a budget to every model, so that one without marks of
            reasoning is served without it.

    Raises:
        InvalidSamplingParams: The model's reasoning has no mark that could be forced.
    """
    reasoning = formats.reasoning
    if reasoning is None or not reasoning.closing:
        if is_hint:
            return params
        raise InvalidSamplingParams(
            f"thinking_token_budget={num_tokens}: no mark is known that ends this model's "
            "reasoning; leave it out, or set the server's reasoning_parser to one with such marks, "
            "as qwen3 and deepseek_r1 have"
        )
    budget = ThinkingBudget(num_tokens, reasoning.closing, reasoning.opening)
    return replace(params, thinking_budget=budget)


def constrain(
    params: SamplingParams,
    answer: StructuredOutputs | None,
    use: ToolUse,
    formats: AnswerFormats,
    field: str,
) -> SamplingParams:
    """Return sampling parameters whose grammar includes the response format and the calls.

    Args:
        params: Parameters; structured outputs in them are those of the request's own field.
        answer: JSON format of an answer without calls; None for text.
        use: The tools of the request.
        formats: The model's formats.
        field: Name of the request's response format, for the error.

    Raises:
        InvalidSamplingParams: Structured outputs, and a format or a required call as well.
    """
    form = params.structured_outputs  # of the whole answer, including calls
    if form is None:
        form = _form_of(answer, use, formats) if use.may_call else answer
    elif answer is not None or use.choice == "required":
        raise InvalidSamplingParams(
            f"structured_outputs constrains the whole answer: leave out {field}, and leave "
            "tool_choice at auto"
        )
    if use.tools and use.choice == "none" and form is None and formats.tools.opens:
        params = replace(params, bad_words=(*params.bad_words, formats.tools.opens))
    stop = params.stop
    if formats.tools.closes and use.tools and not use.is_parallel and use.choice == "auto":
        stop = (*stop, formats.tools.closes)  # no second call may follow
    if form is params.structured_outputs and stop is params.stop:
        return params  # unchanged, and checked already
    return replace(params, structured_outputs=form, stop=stop)


def _form_of(
    answer: StructuredOutputs | None, use: ToolUse, formats: AnswerFormats
) -> StructuredOutputs | None:
    """Return the structured output that an answer with calls must follow, if any."""
    is_framed = formats.reasoning is not None and bool(formats.reasoning.frames)
    if use.choice == "auto" and is_framed:
        return answer  # calls stand outside of the answer's text
    if use.choice == "auto" and answer is None and not any(t.is_strict for t in use.tools):
        return None
    called = [tool for tool in use.tools if use.only in (None, tool.name)]
    rules = _CallRules(formats, called, use.is_parallel)
    if use.choice == "required":
        reasoning = rules.reasoning if is_framed else rules.gap
        head = [f"start: {reasoning}{rules.calls}"]
    elif answer is not None:
        assert answer.json_object or answer.json is not None, "formats of answers are text or JSON"
        schema = {"type": "object"} if answer.json_object else json.loads(answer.source)
        head = [f"start: {rules.calls} | answer", f"answer: {_json_rule(schema)}"]
    else:
        head = rules.text_and_calls()
    return StructuredOutputs(grammar="%llguidance {}\n" + "\n".join([*head, *rules.lines]))


class _CallRules:
    """Grammar rules for calls, in ``llguidance``'s notation.

    Attributes:
        lines: The rules.
        calls: Expression for all calls of an answer.
        reasoning: Expression for what may precede them in harmony's format.
        gap: Expression for what may stand between reasoning in tags and them.
    """

    def __init__(self, formats: AnswerFormats, tools: Sequence[Tool], is_parallel: bool) -> None:
        """Write the rules for tools that may be called."""
        self._formats, self._written = formats, formats.tools
        self._is_parallel = is_parallel and self._written.separator is not None
        names = [f"call_{place}" for place in range(len(tools))]
        self.lines = [f"call: {' | '.join(names)}", r"TEXT: /(.|\n)*/"]
        for name, tool in zip(names, tools, strict=True):
            self.lines += [
                f"{name}: {self._call(self._written.written, name, tool)}",
                f"{name}_arguments: {_json_rule({'type': 'object', **_schema_of(tool)})}",
            ]
        self._tools = dict(zip(names, tools, strict=True))
        first, last = self._written.group
        more = f"({self._literal(self._written.separator or '')} call){{0,{_MAX_CALLS - 1}}}"
        several = f"call {more}" if self._is_parallel else "call"
        self.calls = f"{self._literal(first)} {several} {self._literal(last)}"
        self.gap = ""
        if formats.reasoning is not None:  # templates write an empty line there, and models do
            self.gap = "GAP? "
            self.lines.append(r"GAP: /\n{1,2}/")
        self.reasoning = (
            f"({self._literal('<|channel|>analysis<|message|>')} TEXT "
            f"{self._literal('<|end|><|start|>assistant')})? "
        )

    def text_and_calls(self) -> list[str]:
        """Return rules for text with optional calls: a call once begun must be well formed."""
        opens = self._written.opens
        if not opens:  # a call is all of the answer, and begins as no text may
            return [f"start: {self.calls} | PLAIN | ", r"PLAIN: /[^{](.|\n)*/"]
        if opens in self._formats.special_ids:
            return [f"start: TEXT | TEXT {self.calls}"]
        several = "*" if self._is_parallel else "?"
        rest = [
            f"rest_{name}: {self._call(self._written.written.removeprefix(opens), name, tool)}"
            for name, tool in self._tools.items()
        ]
        rests = " | ".join(f"rest_{name}" for name in self._tools)
        return [
            f"start: (opened ({rests})){several} TEXT",
            f"opened[lazy]: TEXT {json.dumps(opens)}",
            *rest,
        ]

    def _call(self, written: str, name: str, tool: Tool) -> str:
        head, _, rest = written.partition("NAME")
        middle, _, tail = rest.partition("ARGUMENTS")
        return f"{self._literal(head + tool.name + middle)} {name}_arguments {self._literal(tail)}"

    def _literal(self, text: str) -> str:
        """Quote a text; marks are written by id, as the model was trained to write them."""
        ids = self._formats.mark_ids
        marks = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
        parts = re.split(f"({marks})", text) if marks else [text]
        written = (
            f"<[{ids[p]}]>" if p in ids else json.dumps(p, ensure_ascii=False) for p in parts if p
        )
        return " ".join(written)


def _schema_of(tool: Tool) -> Mapping[str, Any]:
    return closed(tool.parameters) if tool.binding is None else tool.binding


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, **_SPACING}, ensure_ascii=False)}"

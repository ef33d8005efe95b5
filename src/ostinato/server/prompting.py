"""Turns a conversation with tools into a prompt, and reads its answer.

A chat template that shows tools, and calls in a format of ``answer_formats``, is handed them. For
every other template they are described in the system message in Hermes' format, calls of earlier
turns are written into the assistant's text, and results are shown to the user's side in
``<tool_response>`` tags.

====================  =====================================================================
``tool_choice``       what the model may write
====================  =====================================================================
none                  text: the mark that begins a call is not sampled, where a format has one; the
                      prompt shows the tools, so that it begins as in other turns
auto                  anything; calls are read out of it. If a tool is ``strict``, a call that is
                      begun fits the schema (not in harmony's format)
required              one call or several, of any tool, that fit their schemas
a tool                one call of it that fits its schema
====================  =====================================================================
"""

import inspect
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import Request
from transformers import PreTrainedTokenizerBase

from ostinato.core.errors import RequestError
from ostinato.engine.grammar.thinking_budget import ThinkingBudget
from ostinato.engine.prompts.chat import RenderedChat
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.protocol.conversation import Message, ToolUse
from ostinato.protocol.messages import CountBody
from ostinato.protocol.responses import ResponsesBody
from ostinato.server.access.callers import Caller
from ostinato.server.answers.answer_formats import AnswerFormats
from ostinato.server.answers.answer_parser import AnswerParser, ParsedAnswer
from ostinato.server.call import sender
from ostinato.server.middleware import accept_fields, set_aside
from ostinato.server.state import ServerState
from ostinato.settings import KeepReasoning

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

_INSTRUCTION = """You may call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between tags:
<tool_call>
{{"name": <name>, "arguments": <object that fits "parameters">}}
</tool_call>"""


def describe_tools(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """Write tools, calls and results into messages, for a template without tools."""
    plain = [_without_calls(message) for message in messages]
    if not use.tools:
        return plain
    lines = "\n".join(json.dumps(tool.describe(), ensure_ascii=False) for tool in use.tools)
    instruction = _INSTRUCTION.format(tools=lines)
    if plain and plain[0]["role"] in ("system", "developer"):
        # Tools come first, as in templates with tools: they change less often than the rest.
        first = {**plain[0], "content": f"{instruction}\n\n{text_of(plain[0]['content'])}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def read_arguments(messages: Sequence[Message], as_text: bool = False) -> list[Message]:
    """Convert the arguments of earlier calls to objects or text, as the template expects."""
    given = _with_text if as_text else _with_object
    return [
        {**m, "tool_calls": [given(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def without_later_systems(messages: Sequence[Message]) -> list[Message]:
    """Make system messages behind the first the user's, for templates that refuse them there.

    A message beside another one of the user joins it, since such templates want turns to alternate.
    """
    settled: list[Message] = []
    joins = False
    for number, message in enumerate(messages):
        is_later = number > 0 and message["role"] == "system"
        if is_later:
            message = {"role": "user", "content": message["content"]}
        if (joins or is_later) and settled and settled[-1]["role"] == message["role"] == "user":
            content = _joined(settled.pop()["content"], message["content"])
            message = {**message, "content": content}
        joins = is_later
        settled.append(message)
    return settled


def _joined(first: Any, second: Any) -> Any:
    """Join two contents: texts by an empty line, parts one after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    text = [
        {"type": "text", "text": part} if isinstance(part, str) else part
        for content in (first, second)
        for part in ([content] if isinstance(content, str) else content)
    ]
    return text


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _without_calls(message: Message) -> Message:
    """Write a message's calls or result as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": _enclosed(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{_OPEN}\n{_write_call(_with_object(call)['function'])}\n{_CLOSE}" for call in calls
    ]
    text = text_of(message.get("content"))
    return {"role": message["role"], "content": "\n".join([text, *written] if text else written)}


def _enclosed(content: Any) -> Any:
    """Write a result between tags; images keep their positions."""
    opening, closing = "<tool_response>\n", "\n</tool_response>"
    if not isinstance(content, list) or all(part.get("type") == "text" for part in content):
        return f"{opening}{text_of(content)}{closing}"
    tags = ({"type": "text", "text": tag} for tag in (opening, closing))
    return [next(tags), *content, next(tags)]


def _write_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(call, ensure_ascii=False)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments; invalid JSON stays text."""
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as text."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**call["function"], "arguments": arguments}}


_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
_ARGUMENTS -= {"add_generation_prompt", "continue_final_message"}  # fields of the body

_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that are searched for marks of reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How the answer to one prompt is sampled and parsed.

    Attributes:
        formats: The model's formats.
        use: The tools of the request.
        may_reason: Whether reasoning is parsed.
        is_reasoning: Whether the answer begins inside reasoning.
    """

    formats: AnswerFormats
    use: ToolUse
    may_reason: bool = False
    is_reasoning: bool = False

    def parser(self, is_limited: bool = True) -> AnswerParser:
        """Return a parser for one answer; unlimited, it reads calls that the request forbids."""
        return AnswerParser(
            self.formats.tools if self.use.may_call else None,
            self.formats.reasoning if self.may_reason else None,
            self.is_reasoning,
            None if self.use.is_parallel or not is_limited else 1,
        )

    @property
    def has_frames(self) -> bool:
        """Whether each part of an answer has a header of its own, as in harmony's format."""
        return self.formats.reasoning is not None and bool(self.formats.reasoning.frames)

    def spoken(self, text: str) -> str | None:
        """Return what follows the reasoning of an answer; None if there is none, or no end."""
        reasoning = self.formats.reasoning
        if reasoning is None or not self.may_reason or not reasoning.closing or self.has_frames:
            return None
        if not (self.is_reasoning or text.lstrip().startswith(reasoning.opening)):
            return None
        _, closing, spoken = text.partition(reasoning.closing)
        return spoken if closing else None

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens that are read out of the answer."""
        is_read = self.use.may_call or self.may_reason
        return frozenset(self.formats.special_ids.values() if is_read else ())

    def settle(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters: marks are kept, and grammars start after the reasoning."""
        formats = self.formats
        if formats.special_ids and (self.use.may_call or self.may_reason):
            params = replace(params, skip_special_tokens=False)
        if params.thinking_budget is not None:
            params = replace(params, thinking_budget=self._budget(params.thinking_budget))
        form, reasoning = params.structured_outputs, formats.reasoning
        if form is None or reasoning is None or not self.may_reason:
            return params
        if reasoning.frames and self.use.choice == "required":
            return params  # its grammar allows reasoning
        begins_free = self.is_reasoning or bool(reasoning.frames)
        after = reasoning.before_text
        if not after:
            return params
        opening = None if begins_free else reasoning.opening
        return replace(params, structured_outputs=replace(form, after=after, opening=opening))

    def _budget(self, budget: ThinkingBudget) -> ThinkingBudget | None:
        """Return a budget as it applies to this prompt; None where no reasoning follows."""
        if not self.may_reason:
            return None
        return replace(budget, opening=None) if self.is_reasoning else budget

    def num_reasoning_tokens(self, token_ids: Sequence[int], answer: ParsedAnswer) -> int:
        """Return the number of reasoning tokens of an answer, marks included."""
        if not answer.reasoning:
            return 0
        if not answer.text and not answer.has_calls:
            return len(token_ids)
        closing, ids = list(self.formats.closing_ids), list(token_ids)
        for end in range(len(closing), len(ids) + 1 if closing else 0):
            if ids[end - len(closing) : end] == closing:
                return end
        rest = len(answer.text) + sum(len(call.arguments) for call in answer.calls)
        return round(len(ids) * len(answer.reasoning) / (len(answer.reasoning) + rest))


async def read_with(
    state: ServerState, token_ids: Sequence[int], use: ToolUse, opens_turn: bool = True
) -> AnswerReader:
    """Return how to parse the answer to a prompt."""
    formats = state.formats
    reasoning = formats.reasoning
    if reasoning is None:
        return AnswerReader(formats, use)
    if reasoning.frames or not reasoning.opening:
        return AnswerReader(formats, use, may_reason=True)
    tail = (await state.llm.decode(list(token_ids[-_TAIL_TOKENS:]))).rstrip()
    if tail.endswith(reasoning.closing):
        return AnswerReader(formats, use)
    is_begun = tail.endswith(reasoning.opening)
    return AnswerReader(formats, use, True, is_begun or (reasoning.is_assumed and opens_turn))


class ChatFields(Protocol):
    """The fields of a body that its prompt depends on, besides the conversation."""

    keep_tokens: bool
    keep_reasoning: KeepReasoning | None

    @property
    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how."""

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""


async def render_chat(
    state: ServerState, prompt_context: Prompt, body: ChatFields, messages: Sequence[Message]
) -> tuple[Prompt, RenderedChat]:
    """Load the images of a conversation in OpenAI's format, and render it as token ids.

    Args:
        state: Server state.
        prompt_context: The prompt's sender.
        body: Its tools, and the options of its template.
        messages: The conversation.

    Returns:
        The sender's prompt with its images, and its token ids.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: The template refuses the conversation, a variable has the name of an argument
            of ``apply_chat_template``, the model accepts no images or fewer, or one cannot be
            loaded.
    """
    options = body.template()
    for name in options.keys() & _ARGUMENTS:  # they would change how the template is applied
        raise RequestError(
            f"chat_template_kwargs[{name!r}]={options[name]!r:.80}: {name!r} is not a variable of "
            "a chat template"
        )
    messages, images = await state.llm.tokenizing.load_images(messages, prompt_context.cache_salt)
    prompt_context = replace(prompt_context, images=images)
    chat = await render_prompt(state, messages, body.tool_use, prompt_context, **options)
    return prompt_context, chat


async def count_prompt(
    request: Request,
    state: ServerState,
    caller: Caller,
    body: CountBody | ResponsesBody,
    messages: Sequence[Message],
) -> int:
    """Count the tokens of a conversation's prompt, without running it."""
    accept_fields(request, state, body)
    prompt = sender(
        caller,
        body.cache_salt,
        adapter=state.adapter_of(body.model),
        keep_tokens=body.keep_tokens,
        keep_reasoning=body.keep_reasoning,
    )
    settled = await set_aside(request, state, prompt.cache_salt, messages)
    prompt, rendered = await render_chat(state, prompt, body, settled.messages)
    return state.llm.tokenizing.num_tokens(prompt.images, rendered.tokens.tokens)


def render_prompt(
    state: ServerState,
    messages: Sequence[Message],
    use: ToolUse,
    prompt_context: Prompt,
    **options: Any,
) -> Awaitable[RenderedChat]:
    """Render a conversation as token ids, by the model's chat template.

    An image is one placeholder token here, and more once the prompt has its images.

    Args:
        state: Server state.
        messages: In OpenAI's format, with loaded images.
        use: The tools of the request.
        prompt_context: From ``sender``: the tenant to tokenize for, and its known texts.
        **options: Variables of the template; by default it opens the assistant's turn.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: There is no template, or it refuses the conversation.
    """
    described, history = None, messages
    if not state.formats.takes_later_systems:
        messages = without_later_systems(messages)
    if state.formats.is_native:
        messages = read_arguments(messages, state.formats.tools.takes_text)
        described = [tool.describe() for tool in use.tools]
    else:
        messages = describe_tools(messages, use)
    options.setdefault("add_generation_prompt", True)
    return state.llm.tokenizing.render(
        prompt_context, messages, tools=described, history=history, **options
    )

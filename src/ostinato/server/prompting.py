"""Turns a conversation with tools into a prompt, and reads its answer."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from ostinato.core.errors import RequestError
from ostinato.engine.grammar.thinking_budget import ThinkingBudget
from ostinato.engine.prompts.chat_turns import RenderedChat
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.text.tokenized_text import TokenizedText
from ostinato.protocol.conversation import Message, ToolUse
from ostinato.server.access.callers import Caller
from ostinato.server.answers.answer_formats import AnswerFormats
from ostinato.server.answers.answer_parser import AnswerParser, ParsedAnswer
from ostinato.server.answers.tools import (
    describe_tools,
    read_arguments,
    without_later_systems,
)
from ostinato.server.state import ServerState
from ostinato.settings import KeepReasoning

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

    cache_salt: str
    keep_tokens: bool
    keep_reasoning: KeepReasoning | None

    @property
    def tool_use(self) -> ToolUse:
        """Return which tools may be called, and how."""

    def template(self) -> dict[str, Any]:
        """Return the options of the chat template."""


async def render_chat(
    state: ServerState,
    caller: Caller,
    body: ChatFields,
    messages: Sequence[Message],
    adapter: str = "",
) -> tuple[Prompt, TokenizedText]:
    """Load the images of a conversation in OpenAI's format, and render it as token ids.

    Returns:
        A prompt that identifies the sender, and has the images and what the ledger of turns did;
        and the token ids.

    Raises:
        MissingTokenizer: The checkpoint has none.
        RequestError: The template refuses the conversation, the model accepts no images or fewer,
            or one cannot be loaded.
    """
    options = body.template()
    _check_variables(options)
    prompt_context = sender(caller, body.cache_salt, body.keep_tokens)
    messages, images = await state.llm.tokenizing.load_images(messages, prompt_context.cache_salt)
    prompt_context = replace(
        prompt_context, images=images, adapter=adapter, keep_reasoning=body.keep_reasoning
    )
    chat = await render_prompt(state, messages, body.tool_use, prompt_context, **options)
    return replace(prompt_context, begun=chat.begun, report=chat.report), chat.tokens


def _check_variables(options: Mapping[str, Any]) -> None:
    """Refuse variables that would change how a template is applied.

    Raises:
        RequestError: One has the name of an argument of ``apply_chat_template``.
    """
    for name in options.keys() & _ARGUMENTS:
        raise RequestError(
            f"chat_template_kwargs[{name!r}]={options[name]!r:.80}: {name!r} is not a variable of "
            "a chat template"
        )


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


def sender(caller: Caller, cache_salt: str = "", keep_tokens: bool = True) -> Prompt:
    """Return a prompt that identifies its sender."""
    return Prompt(
        cache_salt=caller.narrow(cache_salt),
        public_prefixes=tuple(caller.public_prefixes),
        keep_tokens=keep_tokens,
    )

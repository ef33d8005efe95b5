"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from functools import cached_property

from fastapi import APIRouter
from pydantic import ConfigDict, Field, model_validator

from ostinato.protocol.answers import Detokenized, Tokenized
from ostinato.protocol.body import MAX_MESSAGES, Body, Items
from ostinato.protocol.chat import ChatMessage, TemplateFields, functions_of
from ostinato.protocol.conversation import ToolUse, use_tools
from ostinato.protocol.sampling import KEEP_TOKENS, ShortText
from ostinato.protocol.tools import MAX_TOOLS, ChatTool
from ostinato.server.access.callers import CallerDep
from ostinato.server.call import sender
from ostinato.server.prompting import render_chat
from ostinato.server.state import StateDep

router = APIRouter(tags=["tokens"])


class TokenizeBody(TemplateFields):
    """A text, or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: Items[ChatTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokenizer's special tokens to a text."
    )
    return_token_strs: bool = Field(default=False, description="Add the text of each token.")
    cache_salt: ShortText = ""
    keep_tokens: bool = KEEP_TOKENS

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is for texts: the chat template adds its own")
        return self

    @cached_property
    def tool_use(self) -> ToolUse:
        """Return the tools that the prompt describes."""
        return use_tools(functions_of(self.tools), "auto")


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeBody, state: StateDep, caller: CallerDep) -> Tokenized:
    """Return the prompt ids of a completion or a chat."""
    prompt = sender(
        caller,
        body.cache_salt,
        adapter=state.adapter_of(body.model or state.config.model_names[0]),
        keep_tokens=body.keep_tokens,
        keep_reasoning=body.keep_reasoning,
    )
    if body.messages is not None:
        messages, settle = [each.rendered() for each in body.messages], state.stabiliser.settle
        settled = await state.llm.tokenizing.run(lambda: settle(messages), prompt.cache_salt)
        prompt, rendered = await render_chat(state, prompt, body, settled.messages)
        tokens = await state.llm.tokenizing.with_images(rendered.tokens, prompt.images)
    else:
        adds = body.add_special_tokens is not False
        tokens = await state.llm.encode(
            body.prompt or "", prompt_context=prompt, add_special_tokens=adds
        )
    texts = await state.llm.tokenizing.pieces(tokens) if body.return_token_strs else None
    return Tokenized(
        tokens=tokens,
        count=len(tokens),
        max_model_len=state.llm.max_model_len,
        token_strs=texts,
    )


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeBody, state: StateDep, caller: CallerDep) -> Detokenized:
    """Return the text of ids, special tokens included."""
    state.adapter_of(body.model or state.config.model_names[0])
    return {"prompt": await state.llm.decode(body.tokens)}

"""Which tokens is a text made of? ``/tokenize`` and ``/detokenize``, as vLLM has them."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from ostinato.server.callers import CallerOfRequest
from ostinato.server.models import check_model
from ostinato.server.prompting import sender
from ostinato.server.protocol.body import Body, Items
from ostinato.server.protocol.chat import ChatMessage
from ostinato.server.protocol.sampling import KEEP_TOKENS, ShortText
from ostinato.server.state import ServerState

router = APIRouter(tags=["tokens"])


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1)
    add_generation_prompt: bool = True
    cache_salt: ShortText = ""
    keep_tokens: bool = KEEP_TOKENS

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, caller: CallerOfRequest) -> dict[str, Any]:
    """Return the ids that a completion or a chat would compute."""
    state: ServerState = request.app.state.server
    check_model(state, body.model or state.config.model_names[0])
    whose = sender(caller, body.cache_salt, body.keep_tokens)
    if body.messages is not None:
        messages = [message.rendered() for message in body.messages]
        rendered = await state.llm.render(messages, None, body.add_generation_prompt, whose=whose)
        tokens = rendered.tokens.tolist()
    else:
        tokens = await state.llm.encode(body.prompt or "", whose=whose)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": state.llm.max_model_len}


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeBody, request: Request, caller: CallerOfRequest
) -> dict[str, str]:
    """Return the text of ids, special ones included."""
    state: ServerState = request.app.state.server
    check_model(state, body.model or state.config.model_names[0])
    return {"prompt": await state.llm.decode(body.tokens)}

"""Bodies of requests."""

from pydantic import Field, model_validator

from ostinato.engine.prompts import Prompt, PromptDict, TokenIds
from ostinato.server.callers import Caller, Callers
from ostinato.server.prompting import sender
from ostinato.server.protocol.body import Body, Items
from ostinato.server.protocol.chat import ChatMessage
from ostinato.server.state import ServerState
from ostinato.tenants.terms import LeaseTerms


class TenantBody(Body):
    """Whose cache is meant."""

    tenant: str = Field(default="", description="Its name; empty where there are no keys.")
    cache_salt: str = Field(default="", description="What its client narrowed it by.")

    def caller(self, callers: Callers) -> Caller:
        """Return who is meant.

        Raises:
            ApiError: There is no such tenant (404).
        """
        return callers.named(self.tenant)


class PrefixBody(TenantBody):
    """A prefix of a tenant: a text, token ids, or a conversation."""

    prompt: str | Items[int] | None = None
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1)
    add_generation_prompt: bool = Field(default=False, description="Open the assistant's turn.")

    @model_validator(mode="after")
    def _one_of_both(self) -> "PrefixBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self

    async def token_ids(self, state: ServerState, whose: Prompt | None = None) -> TokenIds:
        """Return its ids, as the prompts of a sender have them.

        Raises:
            OstinatoError: The model has no tokenizer or template, or the template refuses.
        """
        if self.messages is not None:
            messages = [message.rendered() for message in self.messages]
            opens_turn = self.add_generation_prompt
            return await state.llm.render(messages, None, opens_turn, whose=whose or Prompt())
        if isinstance(self.prompt, str):
            return await state.llm.encode(self.prompt, whose=whose or Prompt())
        return self.prompt or []

    async def as_prompt(self, state: ServerState) -> PromptDict:
        """Return it as the engine takes it, for its tenant."""
        caller = self.caller(state.callers)
        return PromptDict(
            prompt_token_ids=await self.token_ids(state, sender(caller, self.cache_salt)),
            cache_salt=caller.narrow(self.cache_salt),
            public_prefixes=caller.public_prefixes,
        )


class LeaseBody(PrefixBody):
    """A prefix that is to stay."""

    ttl_s: float | None = Field(
        default=None, gt=0, description="Seconds; left out, it is pinned until it is released."
    )
    refresh_on_hit: bool = Field(default=False, description="Each use starts the time anew.")

    def terms(self) -> LeaseTerms:
        """Return for how long."""
        return LeaseTerms(self.ttl_s, self.refresh_on_hit)


class ResetBody(Body):
    """Forget everything."""

    preempt_running: bool = Field(
        default=False, description="Running requests give their blocks back and start again."
    )


class EraseBody(TenantBody):
    """Leave nothing of a tenant."""

    cancel_running: bool = Field(
        default=False, description="Its requests are cancelled; else they are waited for."
    )


class UnpublishBody(Body):
    """Forget a public prefix."""

    cancel_running: bool = Field(
        default=False, description="Requests that begin with it are cancelled; else waited for."
    )


class PrewarmLine(LeaseBody):
    """One line of a file of prompts to compute at the start."""

    pin: bool = Field(default=False, description="Keep it until the lease is ended.")
    publish: str | None = Field(default=None, description="Publish it under this name.")

    @model_validator(mode="after")
    def _public_prefixes_have_no_owner(self) -> "PrewarmLine":
        if self.publish is not None and (self.tenant or self.cache_salt):
            raise ValueError("a public prefix has no owner: leave out tenant and cache_salt")
        return self

"""Request bodies."""

from pydantic import Field, model_validator

from ostinato.core.identity import derive_salt
from ostinato.engine.requests.prompts import Prompt, PromptDict, TokenIds
from ostinato.protocol.body import Body, Items
from ostinato.protocol.chat import ChatMessage
from ostinato.server.prompting import sender
from ostinato.server.state import ServerState
from ostinato.tenants.terms import LeaseTerms


class TenantBody(Body):
    """The tenant, and the salt, whose cache an operation concerns."""

    tenant: str = Field(default="", description="Its name; empty where there are no keys.")
    cache_salt: str = Field(default="", description="A salt that its client set.")


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

    async def token_ids(self, state: ServerState, prompt_context: Prompt | None = None) -> TokenIds:
        """Return its token ids, as a request of that sender would have them.

        Raises:
            OstinatoError: The model has no tokenizer or template, or the template refuses.
        """
        if self.messages is not None:
            chat = await state.llm.tokenizing.render(
                prompt_context or Prompt(),
                [message.rendered() for message in self.messages],
                add_generation_prompt=self.add_generation_prompt,
            )
            return chat.tokens
        if isinstance(self.prompt, str):
            return await state.llm.encode(self.prompt, prompt_context=prompt_context or Prompt())
        return self.prompt or []

    async def as_prompt(self, state: ServerState) -> PromptDict:
        """Return the engine's prompt, for its tenant.

        Raises:
            ApiError: There is no such tenant (404).
        """
        caller = state.callers.named(self.tenant)
        return PromptDict(
            prompt_token_ids=await self.token_ids(state, sender(caller, self.cache_salt)),
            cache_salt=derive_salt(caller.salt, self.cache_salt),
            public_prefixes=caller.public_prefixes,
        )


class LeaseBody(PrefixBody):
    """A prefix to lease or to pin."""

    ttl_s: float | None = Field(
        default=None, gt=0, description="Seconds; left out, it is pinned until it is released."
    )
    refresh_on_hit: bool = Field(default=False, description="Each hit restarts the time.")

    def terms(self) -> LeaseTerms:
        """Return the lease's terms."""
        return LeaseTerms(self.ttl_s, self.refresh_on_hit)


class ResetBody(Body):
    """Reset the cache."""

    preempt_running: bool = Field(
        default=False, description="Preempt running requests; they restart."
    )


class EraseBody(TenantBody):
    """Erase a tenant."""

    cancel_running: bool = Field(
        default=False, description="Cancel its requests instead of waiting for them."
    )


class UnpublishBody(Body):
    """Unpublish a public prefix."""

    cancel_running: bool = Field(
        default=False, description="Cancel requests that use it; by default, wait for them."
    )


class PrewarmLine(LeaseBody):
    """One line of the prewarm file."""

    pin: bool = Field(default=False, description="Keep it until the lease is released.")
    publish: str | None = Field(default=None, description="Publish it under this name.")

    @model_validator(mode="after")
    def _public_prefixes_have_no_owner(self) -> "PrewarmLine":
        if self.publish is not None and (self.tenant or self.cache_salt):
            raise ValueError("a public prefix has no owner: leave out tenant and cache_salt")
        return self

"""Request bodies."""

from dataclasses import replace

from pydantic import Field, model_validator

from ostinato.engine.requests.prompts import Prompt
from ostinato.protocol.body import Body, Items
from ostinato.protocol.chat import ChatMessage
from ostinato.server.call import sender
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

    async def prompt_of(self, state: ServerState, prompt_context: Prompt) -> Prompt:
        """Return the engine's prompt, as a request of that sender would have it.

        Raises:
            OstinatoError: The model has no tokenizer or template, or the template refuses.
        """
        if self.messages is not None:
            chat = await state.llm.tokenizing.render(
                prompt_context,
                [message.rendered() for message in self.messages],
                add_generation_prompt=self.add_generation_prompt,
            )
            return replace(prompt_context, token_ids=chat.tokens, known=chat.tokens)
        content = self.prompt or []
        if isinstance(content, str):
            content = await state.llm.encode(content, prompt_context=prompt_context)
        return replace(prompt_context, token_ids=content)

    async def as_prompt(self, state: ServerState) -> Prompt:
        """Return the engine's prompt, for its tenant.

        Raises:
            ApiError: There is no such tenant (404).
        """
        caller = state.callers.named(self.tenant)
        return await self.prompt_of(state, sender(caller, self.cache_salt))


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

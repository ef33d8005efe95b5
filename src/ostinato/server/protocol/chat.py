"""What may be asked of ``/v1/chat/completions``?"""

from typing import Any, Literal

from pydantic import Field, model_validator

from ostinato.core.sampling_params import SamplingParams
from ostinato.server.protocol.body import Body
from ostinato.server.protocol.sampling import SamplingFields, ShortText


class TextPart(Body):
    """A piece of a message; of pieces, texts alone are taken."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: ShortText | None = None
    refusal: Literal[""] | None = None
    annotations: list[Any] = Field(default_factory=list, max_length=0)

    def rendered(self) -> dict[str, Any]:
        """Return what chat templates read: texts joined, and the developer as the system."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(SamplingFields):
    """Continue a conversation."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, description="Older name of max_completion_tokens."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    add_generation_prompt: bool = Field(default=True, description="Open the assistant's turn.")
    store: Literal[False] = Field(default=False, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] = Field(
        default="auto", description="There is one tier."
    )
    modalities: list[Literal["text"]] = Field(default=["text"], min_length=1)
    response_format: "TextFormat | None" = None

    @model_validator(mode="after")
    def _no_contradictions(self) -> "ChatBody":
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} and "
                f"max_completion_tokens={self.max_completion_tokens}: they mean the same, give one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} without logprobs: set logprobs=true"
            )
        return self

    def params(self) -> SamplingParams:
        """Return the sampler's parameters.

        Raises:
            InvalidSamplingParams: A value is out of range.
        """
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling(most, (self.top_logprobs or 0) if self.logprobs else None)


class TextFormat(Body):
    """The format of an answer: text."""

    type: Literal["text"]

"""The body of ``/v1/completions``."""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from ostinato.protocol.body import Items
from ostinato.protocol.dialects import COMPLETIONS
from ostinato.protocol.sampling import SamplingFields

PromptBody = str | Items[str] | Items[int] | Items[Items[int]]


def each_prompt(prompt: PromptBody) -> list[str | list[int]]:
    """Return a body's prompts: one text or row of ids, or each of several."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt  # type: ignore[return-value]


MAX_PROMPTS = 1024


class CompletionBody(SamplingFields):
    """Continue one prompt, or each of several."""

    dialect: ClassVar = COMPLETIONS
    id_prefix: ClassVar = "cmpl-"

    prompt: PromptBody = Field(
        description="A text, token ids, or a list of either; each prompt is continued by itself."
    )
    max_tokens: int = Field(default=16, ge=0, description="0 only scores the prompt; needs echo.")
    logprobs: int | None = Field(default=None, description="Number of alternatives per token.")
    echo: bool = Field(default=False, description="Start the text with the prompt.")

    @model_validator(mode="after")
    def _something_to_answer(self) -> "CompletionBody":
        if self.prompt == []:
            raise ValueError("prompt is an empty list: give a text, token ids, or a list of either")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(
                f"{len(self.prompts)} prompts: at most {MAX_PROMPTS} in a request; send several"
            )
        if self.echo and self.prompt_logprob_start > 1:
            raise ValueError(
                f"echo with prompt_logprob_start={self.prompt_logprob_start}: an echo shows the "
                "whole prompt; set prompt_logprobs in place of it"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 generates nothing: raise it, or set echo=true")
        if self.max_tokens == 0 and self.use_beam_search:
            raise ValueError("max_tokens=0 with use_beam_search: there is nothing to search")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError(
                f"max_tokens=0 with n={self.n}: there is nothing to sample, leave out n"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts."""
        return each_prompt(self.prompt)

    def sampler(self) -> dict[str, Any]:
        """Return the sampling parameters; one token at least is generated, and may be dropped."""
        values = {**super().sampler(), "max_tokens": self.max_tokens or 1}
        if self.echo and self.logprobs is not None:
            values["prompt_logprobs"] = self.logprobs
        return {**values, "logprobs": self.logprobs}

"""The fields that completions and chats share.

OpenAI's, vLLM's additions under vLLM's names, and ours about the cache. Ranges are checked by
``SamplingParams``, which knows them; here are the types alone.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.structured_outputs import StructuredOutputs
from ostinato.server.protocol.body import Body, Items
from ostinato.tenants.terms import OPENAI_24H, LeaseTerms

TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
"""JSON has string keys only."""

MOST_BIASES = 1024


def _few(biases: Any) -> Any:
    """Refuse more biases than are looked at, before each of them is."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"{len(biases)} tokens: at most {MOST_BIASES} can be biased")
    return biases


Biases = Annotated[dict[TokenIdText, float], BeforeValidator(_few)]

ShortText = Annotated[str, StringConstraints(max_length=512)]


Metadata = Annotated[dict[ShortText, ShortText], Field(max_length=16)]

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

Stops = Annotated[Items[ShortText], Field(max_length=64)]
"""Each is looked for after every token, so there is an end to them."""


class StreamOptions(Body):
    """How a stream is to look."""

    include_usage: bool = Field(
        default=False, description="End with a chunk that has the token counts."
    )
    continuous_usage_stats: bool = Field(
        default=False, description="Give every chunk the token counts so far; needs include_usage."
    )
    include_obfuscation: Literal[False] = Field(
        default=False, description="Random padding against onlookers; there is none."
    )


class FormBody(Body):
    """The form of an answer, as vLLM has it; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None

    def form(self) -> StructuredOutputs:
        """Return the form.

        Raises:
            InvalidSamplingParams: Not exactly one is given.
        """
        return StructuredOutputs(
            self.json_, self.json_object, self.regex, self.choice, self.grammar
        )


class CacheUse(Body):
    """How one request uses the cache."""

    read: bool = Field(default=True, description="Whether cached tokens may be used.")
    write: bool = Field(
        default=True, description="Whether what is computed may be found by others."
    )


KEEP_TOKENS: Any = Field(
    default=True,
    description="Whether earlier answers keep the tokens that were generated; false tokenizes the "
    "whole prompt anew.",
)


class CacheFields(Body):
    """Whose cache is used, and how."""

    cache_salt: ShortText = Field(
        default="",
        description="Only requests of the same salt share anything; narrows that of the key.",
    )
    cache: CacheUse = CacheUse()
    keep_tokens: bool = KEEP_TOKENS
    prompt_cache_key: ShortText | None = Field(
        default=None,
        description="Requests that are meant to meet. On one engine all do; kept on record.",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None,
        description="24h keeps the prompt for a day; in_memory until its place is needed.",
    )

    @model_validator(mode="after")
    def _keep_what_is_written(self) -> "CacheFields":
        if self.prompt_cache_retention == "24h" and not self.cache.write:
            raise ValueError(
                "prompt_cache_retention='24h' keeps what cache.write=false does not write: give "
                "up one of them"
            )
        return self

    @property
    def retention(self) -> LeaseTerms | None:
        """For how long the prompt is kept on purpose."""
        return OPENAI_24H if self.prompt_cache_retention == "24h" else None

    def cache_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` about the cache."""
        return {
            "cache_salt": self.cache_salt,
            "cache_read": self.cache.read,
            "cache_write": self.cache.write,
            "keep_tokens": self.keep_tokens,
            "cache_key": self.prompt_cache_key,
            "retention": self.retention,
        }


class SamplerFields(Body):
    """How each token is chosen, and what ends the answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Biases = Field(default_factory=dict)
    seed: int | None = None
    stop: ShortText | Stops | None = None
    top_k: int = Field(default=0, description="0 or -1 keeps all tokens.")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Items[int] = Field(default_factory=list)

    def sampler(self) -> dict[str, Any]:
        """Return the keywords of ``SamplingParams`` about it."""
        names = [*SamplerFields.model_fields]
        values = {name: getattr(self, name) for name in names}
        biases = {int(token): bias for token, bias in self.logit_bias.items()}
        top_k = 0 if self.top_k == -1 else self.top_k
        return {**values, "logit_bias": biases, "top_k": top_k, "stop": self.stop or ()}


class SamplingFields(SamplerFields, CacheFields):
    """How to sample, and how to answer."""

    model: str
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(
        default=None, ge=1, description="New tokens that make a chunk, if more than the server's."
    )
    user: ShortText | None = Field(
        default=None, description="Whom the client acts for; kept on record."
    )
    bad_words: Stops = Field(default_factory=list, description="Texts that are not generated.")
    allowed_token_ids: Items[int] | None = Field(
        default=None, description="No other token is generated."
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: FormBody | None = None
    guided_json: dict[str, Any] | str | None = Field(
        default=None, description="Older name of structured_outputs.json; so are all guided_*."
    )
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(
        default=None, description="Of each prompt token and so many alternatives; not streamed."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="Keep the prompt's last so many tokens; -1 all that fit."
    )
    return_token_ids: bool = Field(
        default=False, description="Add the ids of prompt and answer, under vLLM's names."
    )
    best_of: Literal[1] | None = Field(default=None, description="Candidates are not ranked.")
    metadata: Metadata = Field(default_factory=dict, description="Taken, and not stored.")
    safety_identifier: ShortText | None = Field(
        default=None, description="Whom the client acts for, if user does not say."
    )
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Lower goes first.")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream=true, or leave them out")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: set stream=false")
        guided = [name for name in _GUIDED if getattr(self, name) is not None]
        if len(guided) + (self.structured_outputs is not None) > 1:
            raise ValueError(
                f"{', '.join(guided)}: one form at most; structured_outputs is the newer name"
            )
        return self

    @property
    def acts_for(self) -> str | None:
        """Whom the client acts for, if it says so."""
        return self.user or self.safety_identifier

    def form(self) -> StructuredOutputs | None:
        """Return the form that was asked for, under its new or its old name.

        Raises:
            InvalidSamplingParams: It is none.
        """
        if self.structured_outputs is not None:
            return self.structured_outputs.form()
        for name in _GUIDED:
            if getattr(self, name) is not None:
                form: Any = {name.removeprefix("guided_"): getattr(self, name)}
                return StructuredOutputs(**form)
        return None

    def usage_so_far(self, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a chunk of a stream says of usage: counts, null, or nothing at all."""
        if not self.include_usage:
            return {}
        assert self.stream_options is not None
        return {"usage": usage() if self.stream_options.continuous_usage_stats else None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the sampler's parameters.

        Raises:
            InvalidSamplingParams: A value is out of range.
        """
        return SamplingParams(
            **self.sampler(),
            n=self.n,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=self.form(),
            stream_interval=self.stream_interval,
        )

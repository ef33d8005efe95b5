"""Which fields do completions and chats share?

OpenAI's, vLLM's additions under vLLM's names, and ours about the cache. Ranges are checked by
``SamplingParams``, which knows them; here are the types alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ostinato.core.lease import OPENAI_24H, LeaseTerms
from ostinato.core.sampling_params import SamplingParams
from ostinato.core.structured_outputs import StructuredOutputs
from ostinato.server.protocol.body import Body, Items

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


Stops = Annotated[Items[ShortText], Field(max_length=64)]
"""Each is looked for after every token, so there is an end to them."""


class StreamOptions(Body):
    """How a stream is to look."""

    include_usage: bool = Field(
        default=False, description="End with a chunk that has the token counts."
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


class CacheFields(Body):
    """Whose cache is used, and how."""

    cache_salt: ShortText = Field(
        default="",
        description="Only requests of the same salt share anything; narrows that of the key.",
    )
    cache: CacheUse = CacheUse()
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
            "cache_key": self.prompt_cache_key,
            "retention": self.retention,
        }


class SamplingFields(CacheFields):
    """How to sample, and how to answer."""

    model: str
    n: int = Field(default=1, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Biases = Field(default_factory=dict)
    seed: int | None = None
    stop: ShortText | Stops | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: ShortText | None = Field(
        default=None, description="Whom the client acts for; kept on record."
    )
    top_k: int = Field(default=0, description="0 or -1 keeps all tokens.")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Items[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: FormBody | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Lower goes first.")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream=true, or leave them out")
        return self

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
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=None
            if self.structured_outputs is None
            else self.structured_outputs.form(),
        )

"""The fields that completions and chats share.

OpenAI's, vLLM's additions under vLLM's names, and our own for the cache. Types are checked here,
ranges by ``SamplingParams``.
"""

from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ostinato.core.sampling_params import Beams
from ostinato.protocol.body import Body, Items, OpenBody
from ostinato.protocol.dialects import ApiBody
from ostinato.protocol.marks import Ttl, seconds_of
from ostinato.tenants.terms import OPENAI_24H, LeaseTerms

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = "A variable of the chat template, for models that use it; high is the highest."


def template_effort(effort: str) -> str:
    """Return an effort as templates know it: none of them has more than ``high``."""
    return "high" if effort in ("xhigh", "max") else effort


TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
"""Keys are strings, as JSON has no others."""

MAX_BIASES = 1024


def _few(biases: Any) -> Any:
    """Refuse too many biases before validating each of them."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} tokens: at most {MAX_BIASES} can be biased")
    return biases


Biases = Annotated[dict[TokenIdText, float], BeforeValidator(_few)]

ShortText = Annotated[str, StringConstraints(max_length=512)]


Metadata = Annotated[dict[ShortText, ShortText], Field(max_length=16)]

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

Stops = Annotated[Items[ShortText], Field(max_length=64)]
"""Stop strings; limited, since each is searched after every token."""


class StreamOptions(OpenBody):
    """Options of a stream."""

    include_usage: bool = Field(
        default=False, description="End with a chunk that has the token counts."
    )
    continuous_usage_stats: bool = Field(
        default=False, description="Give every chunk the token counts so far; needs include_usage."
    )


Form = dict[str, Any]
"""Keywords of ``StructuredOutputs``."""


class FormBody(Body):
    """Structured output, as in vLLM; exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None

    def form(self) -> Form:
        """Return the structured output."""
        names = ("json_object", "regex", "choice", "grammar")
        return {"json": self.json_, **{name: getattr(self, name) for name in names}}


class StructuredFields(OpenBody):
    """The structured output of the whole answer."""

    structured_outputs: FormBody | None = Field(default=None, description="Ours, from vLLM.")

    def form(self) -> Form | None:
        """Return the structured output of the whole answer."""
        return None if self.structured_outputs is None else self.structured_outputs.form()


class CacheUse(Body):
    """How one request uses the cache."""

    read: bool = Field(default=True, description="Whether to use cached tokens.")
    write: bool = Field(default=True, description="Whether to publish computed blocks.")


CACHE_SALT: Any = Field(
    default="",
    description="Only requests of the same salt share blocks; added to the key's salt.",
)

KEEP_TOKENS: Any = Field(
    default=True,
    description="Whether earlier answers keep the tokens that were generated; false tokenizes the "
    "whole prompt anew.",
)


KEEP_REASONING: Any = Field(
    default=None,
    description="always: earlier reasoning stays where the chat template drops it; template: it is "
    "dropped there. Left out, the server's setting.",
)


class PromptCacheOptions(OpenBody):
    """How long the prompt is kept."""

    mode: Literal["implicit", "explicit"] = Field(
        default="implicit",
        description="implicit keeps all of the prompt for the ttl, if one is given; explicit keeps "
        "it up to its marks only.",
    )
    ttl: Ttl | None = Field(default=None, description="Such as 30m; each use restarts the time.")


DEFAULT_TTL = "30m"
"""Of marks without a time, as in OpenAI's API."""


class CacheFields(ApiBody):
    """Cache salt, use and retention."""

    cache_salt: ShortText = CACHE_SALT
    cache: CacheUse = CacheUse()
    keep_tokens: bool = KEEP_TOKENS
    prompt_cache_key: ShortText | None = Field(
        default=None,
        description="Group of requests; for the record, since all run on one engine.",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None,
        description="24h leases the prompt for a day; in_memory keeps it until eviction.",
    )
    prompt_cache_options: PromptCacheOptions | None = Field(
        default=None, description="Its ttl leases the prompt; it takes the place of retention."
    )

    @model_validator(mode="after")
    def _keep_what_is_written(self) -> "CacheFields":
        if not self.cache.write and self.retention is not None:
            raise ValueError("a lease by prompt_cache_retention or ttl needs cache.write=true")
        return self

    @property
    def retention(self) -> LeaseTerms | None:
        """Terms of the prompt's lease; None for no lease."""
        options = self.prompt_cache_options
        if options is not None and options.mode == "explicit":
            return None
        if options is not None and options.ttl is not None:
            return LeaseTerms(seconds_of(options.ttl), refresh_on_hit=True)
        return OPENAI_24H if self.prompt_cache_retention == "24h" else None

    @property
    def mark_ttl(self) -> str:
        """The time of marks that have none of their own."""
        options = self.prompt_cache_options
        return DEFAULT_TTL if options is None else options.ttl or DEFAULT_TTL

    def call_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` that clients set."""
        return {"cache_key": self.prompt_cache_key, "retention": self.retention}


class SamplerFields(OpenBody):
    """Sampling and stop conditions."""

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
        """Return the keywords of ``SamplingParams``."""
        values = dict(zip(_SAMPLER, attrgetter(*_SAMPLER)(self), strict=True))
        top_k = 0 if self.top_k == -1 else self.top_k
        return {**values, "top_k": top_k, "stop": self.stop or ()}


_SAMPLER = [*SamplerFields.model_fields]
_SAMPLING = (
    "n", "bad_words", "allowed_token_ids", "prompt_logprobs", "prompt_logprob_start",
    "truncate_prompt_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "stream_interval", "drafts",
)  # fmt: skip
"""Fields that are keywords of ``SamplingParams``."""


class SamplingFields(SamplerFields, StructuredFields, CacheFields):
    """Sampling, and the format of the response."""

    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(
        default=None, ge=1, description="Tokens per chunk, if more than the server's."
    )
    user: ShortText | None = Field(
        default=None, description="The client's end user, for the record."
    )
    drafts: Literal["auto", "off"] = Field(
        default="auto",
        description="off computes one token per step; the answer is the same to the bit.",
    )
    use_beam_search: bool = Field(
        default=False, description="Search the most likely answers; a stream gets them at its end."
    )
    beam_width: int | None = Field(
        default=None, ge=1, description="Beams that go on after each token; else n."
    )
    length_penalty: float = Field(
        default=1.0, description="Of beams: exponent of the length that divides log-probabilities."
    )
    early_stopping: bool | Literal["never"] = Field(
        default=False, description="Of beams: when the search ends, as in transformers."
    )
    bad_words: Stops = Field(default_factory=list, description="Texts that must not be generated.")
    allowed_token_ids: Items[int] | None = Field(
        default=None, description="Only these tokens may be generated."
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guided_json: dict[str, Any] | str | None = Field(
        default=None, description="Older name of structured_outputs.json; so are all guided_*."
    )
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(
        default=None, description="Number of alternatives per prompt token; not streamed."
    )
    prompt_logprob_start: int = Field(
        default=0,
        ge=0,
        description="First prompt token that gets them; what precedes it may hit the cache.",
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="Keep the prompt's last tokens; -1: all that fit.",
    )
    return_token_ids: bool = Field(
        default=False, description="Return the token ids of prompt and answer, as vLLM does."
    )
    best_of: Literal[1] | None = Field(default=None, description="Candidates are not ranked.")
    metadata: Metadata = Field(default_factory=dict, description="Accepted, and not stored.")
    safety_identifier: ShortText | None = Field(
        default=None, description="The client's end user, if user is not set."
    )
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Lower goes first.")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream=true, or leave them out")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: set stream=false")
        if self.beam_width is not None and not self.use_beam_search:
            raise ValueError("beam_width is for beams: set use_beam_search=true, or leave it out")
        guided = [name for name in _GUIDED if getattr(self, name) is not None]
        if len(guided) + (self.structured_outputs is not None) > 1:
            raise ValueError(
                f"{', '.join(guided)}: give at most one; structured_outputs is the newer name"
            )
        return self

    def call_settings(self) -> dict[str, Any]:
        """Return the keywords of ``GenerateCall`` that clients set."""
        user = self.user or self.safety_identifier
        return {**super().call_settings(), "priority": self.priority, "user": user}

    def form(self) -> Form | None:
        """Return the structured output of the whole answer, from its new or its old field."""
        for name in _GUIDED:
            if getattr(self, name) is not None:
                return {name.removeprefix("guided_"): getattr(self, name)}
        return super().form()

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk of a stream has the token counts so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampler(self) -> dict[str, Any]:
        """Return the keywords of ``SamplingParams``, without those that only one API has."""
        own = zip(_SAMPLING, attrgetter(*_SAMPLING)(self), strict=True)
        values = {**super().sampler(), **dict(own)}
        if self.use_beam_search:
            width = self.n if self.beam_width is None else self.beam_width
            values["beams"] = Beams(width, self.length_penalty, self.early_stopping)
        return values

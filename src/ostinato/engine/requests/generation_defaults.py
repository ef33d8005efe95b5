"""Sampling parameters of requests that do not give them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.engine.requests.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters of requests that do not give them.

    Attributes:
        values: By the names of ``SamplingParams``; what is missing is that class's own default.
        source: Where they come from; empty if there are none.
        max_tokens: Most tokens of any answer of the server, whatever a request says; from
            ``override_generation_config``, as in vLLM. None is no limit.
        eos_token_ids: Ids that end a text, in place of the checkpoint's; None leaves those.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    max_tokens: int | None = None
    eos_token_ids: frozenset[int] | None = None

    def params(self) -> SamplingParams:
        """Return the parameters of a request that gives none; the caller's own, to be changed."""
        return SamplingParams(**self.values)

    def fill(self, params: SamplingParams, given: Collection[str]) -> SamplingParams:
        """Return parameters with defaults for those that a request did not give.

        Beams are not sampled: of the defaults they have ``max_tokens`` alone.

        Args:
            params: Of the request.
            given: Names that the request gave; ``max_tokens`` counts as given unless it is None.
        """
        missing = {
            name: value
            for name, value in self.values.items()
            if name not in given
            and (params.max_tokens is None if name == "max_tokens" else params.beams is None)
        }
        limit = self.max_tokens
        if limit is not None:
            missing["max_tokens"] = min(
                missing.get("max_tokens", params.max_tokens) or limit, limit
            )
        if params.min_tokens > missing.get("max_tokens", params.min_tokens):
            del missing["max_tokens"]  # a request's own minimum is above the default
        return replace(params, **missing) if missing else params

    def __str__(self) -> str:
        """Such as ``temperature 0.7, top_p 0.8 (generation_config.json)``."""
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return (
            f"{shown} ({self.source})" if shown else "temperature 1 (the checkpoint says nothing)"
        )

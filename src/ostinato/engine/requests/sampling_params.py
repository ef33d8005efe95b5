"""The sampling parameters of a request, those that concern text included, and their defaults."""

import copy
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any

from ostinato.core import sampling_params as core
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.grammar.thinking_budget import ThinkingBudget
from ostinato.engine.settings.keywords import accepts_vllm_keywords
from ostinato.engine.settings.vllm_keywords import UNSUPPORTED_SAMPLING
from ostinato.errors import InvalidSamplingParams

MAX_STOPS_OF_BEAMS = 16

_NOT_WITH_BEAMS = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "bad_words_ids", "stop", "min_tokens",
    "structured_outputs", "thinking_budget", "prompt_logprobs", "readout",
)  # fmt: skip
"""What would change the probabilities that beams are compared by, or needs one text at a time."""


class RequestOutputKind(Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """All of the text so far."""
    DELTA = 1
    """The part after the previous output."""
    FINAL_ONLY = 2
    """All of it, once, when the request has ended."""


@accepts_vllm_keywords(UNSUPPORTED_SAMPLING, InvalidSamplingParams)
@dataclass(frozen=True, slots=True)
class SamplingParams(core.SamplingParams):
    """How one request is sampled, with vLLM's names.

    Attributes, besides those of ``core.sampling_params.SamplingParams``:
        bad_words: Texts that are not generated: the token that would complete one is not sampled.
        stop: Strings that end the text.
        truncate_prompt_tokens: Keep only this many tokens at the prompt's end; -1 keeps as many as
            leave room for ``max_tokens``, None refuses a prompt that is too long.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: Produce text; False gives token ids alone.
        structured_outputs: Constraint on the text, such as a JSON schema.
        thinking_budget: Tokens of reasoning after which its closing mark is forced.
        output_kind: What each output of a stream of ``AsyncLLM`` holds.
        stream_interval: New tokens that make an output of a stream, if they are more than the
            engine's ``stream_interval``; the first and the last output are sent at once.
        skip_reading_prefix_cache: Compute the whole prompt, whatever is cached.

    ``top_k=-1`` is accepted for 0, ``seed=-1`` for None, and ``prompt_logprob_start=0`` for 1.
    """

    bad_words: Sequence[str] = ()
    stop: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: ThinkingBudget | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        """Check the values, and make the collections immutable.

        Raises:
            InvalidSamplingParams: A value is out of range or of the wrong type.
        """
        self._normalise()
        self._check_ranges()
        self._check_combinations()

    @property
    def num_sequences(self) -> int:
        """Sequences that a request runs at once."""
        return self.n if self.beams is None else self.beams.width

    def clone(self) -> "SamplingParams":
        """Return a copy; changes of the one are none of the other."""
        copied = copy.copy(self)
        object.__setattr__(copied, "logit_bias", dict(self.logit_bias))
        return copied

    def _check_ranges(self) -> None:
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            # Most requests have the defaults, or plain numbers inside of the range.
            if (type(value) is not int or value < low or high is not None) and not (
                value is None and name in _OPTIONAL
            ):
                _check_integer(name, value, low, high)
        for name, floor, ceiling, is_open in _NUMBERS:
            value = getattr(self, name)
            is_inside = type(value) is float and floor <= value <= (ceiling or _MAX_FLOAT)
            if not is_inside or (is_open and value == floor):
                _check_number(name, value, floor, ceiling, is_open)

    def _check_beams(self, beams: core.Beams) -> None:
        if not isinstance(beams, core.Beams):
            raise InvalidSamplingParams(f"beams={beams!r:.80}: must be Beams")
        _check_integer("beam_width", beams.width, 1)
        _check_number("length_penalty", beams.length_penalty, -10.0, 10.0)
        if beams.early_stopping not in (True, False, "never"):
            raise InvalidSamplingParams(
                f"early_stopping={beams.early_stopping!r:.80}: must be true, false or 'never'"
            )
        if self.n > beams.width:
            raise InvalidSamplingParams(
                f"n={self.n} is above beam_width={beams.width}: so many answers are not searched; "
                "raise beam_width"
            )
        if self.temperature not in (0.0, 1.0):
            raise InvalidSamplingParams(
                f"temperature={self.temperature:g}: beams are compared by the model's own "
                "log-probabilities; leave it out"
            )
        if len(self.stop_token_ids) > MAX_STOPS_OF_BEAMS:
            raise InvalidSamplingParams(
                f"{len(self.stop_token_ids)} stop_token_ids: at most {MAX_STOPS_OF_BEAMS} with "
                "beams, each of which is compared by so many tokens more"
            )
        for name in _NOT_WITH_BEAMS:
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                raise InvalidSamplingParams(
                    f"{name}={value!r:.80}: not with beams, which are compared by the model's own "
                    "log-probabilities; leave it out, or sample"
                )

    def _check_combinations(self) -> None:
        if self.beams is not None:
            self._check_beams(self.beams)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: "
                "lower the one or raise the other"
            )
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and value is not _DEFAULTS[name]:
                raise InvalidSamplingParams(f"{name}={value!r:.80}: must be a {kind.__name__}")
        if self.stop and not self.detokenize:
            raise InvalidSamplingParams(
                "stop strings need text: leave detokenize on, or use stop_token_ids"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidSamplingParams("truncate_prompt_tokens=0 leaves no prompt: keep 1 or more")
        if self.allowed_token_ids == ():
            raise InvalidSamplingParams("allowed_token_ids is empty: name one, or give None")
        if () in self.bad_words_ids:
            raise InvalidSamplingParams("bad_words_ids has an empty row: a word has tokens")
        if self.prompt_logprobs is None and self.prompt_logprob_start > 1:
            raise InvalidSamplingParams(
                f"prompt_logprob_start={self.prompt_logprob_start} says where prompt_logprobs "
                "begin, and none are asked for: set prompt_logprobs=0"
            )
        if self.readout is not None and (self.n, self.max_tokens) != (1, 1):
            raise InvalidSamplingParams(
                f"readout with n={self.n} and max_tokens={self.max_tokens}: it is read once, after "
                "the prompt; set both to 1"
            )
        if self.pooling not in ("last", "mean"):
            raise InvalidSamplingParams(f"pooling={self.pooling!r:.80}: must be 'last' or 'mean'")
        if self.pooling == "mean" and (self.readout != () or self.prompt_logprobs is not None):
            raise InvalidSamplingParams(
                f"pooling='mean' with readout={self.readout!r:.80} and "
                f"prompt_logprobs={self.prompt_logprobs}: it is the mean of hidden states alone; "
                "set readout=() and leave prompt_logprobs out"
            )
        if self.drafts not in ("auto", "off"):
            raise InvalidSamplingParams(f"drafts={self.drafts!r:.80}: must be 'auto' or 'off'")

    def _normalise(self) -> None:
        """Make collections immutable, and replace -1 by the value that it means."""
        for name, convert in _COLLECTIONS.items():
            given, default = getattr(self, name), _DEFAULTS[name]
            is_default = given is None or (default is not None and given in ((), [], {}))
            value = copy.copy(default) if is_default else convert(name, given)
            object.__setattr__(self, name, value)
        if not self.prompt_logprob_start:
            object.__setattr__(self, "prompt_logprob_start", 1)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)


_DEFAULTS: dict[str, Any] = {
    each.name: {} if each.name == "logit_bias" else each.default for each in fields(SamplingParams)
}


def _assign(params: SamplingParams, name: str, value: Any) -> None:
    """Change a parameter, as programs for vLLM do; a request keeps those that it came with.

    Raises:
        InvalidSamplingParams: There is no such parameter, or the value is invalid beside the
            others; nothing has changed.
    """
    changed = replace(params, **{name: value})
    for each in fields(params):
        object.__setattr__(params, each.name, getattr(changed, each.name))


SamplingParams.__setattr__ = _assign  # type: ignore[method-assign, assignment]


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


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidSamplingParams(f"{name}={value!r}: must be an integer, {limit}")


def _check_number(
    name: str, value: Any, low: float, high: float | None, is_open: bool = False
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_low = is_number and (value <= low if is_open else value < low)
    if not is_number or not math.isfinite(value) or is_low or (high is not None and value > high):
        limit = f"{'above' if is_open else 'at least'} {low:g}"
        if high is not None:
            limit += f" and at most {high:g}"
        raise InvalidSamplingParams(f"{name}={value!r}: must be a number, {limit}")


def _strings(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else tuple(given)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidSamplingParams(f"{name}={string!r}: must be a string that is not empty")
    return strings


def _ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    checked = _TokenIds(ids)
    if (
        set(map(type, checked)) <= {int}
        and -1 < min(checked, default=0) <= max(checked, default=0) < 2**32
    ):
        return checked
    for token in checked:
        _check_integer(name, token, 0, 2**32 - 1)
    return checked


MAX_LENGTH = 2**31 - 1
"""Beyond it tokenizers take no length."""

_INTEGERS = (
    ("n", 1, None),
    ("top_k", 0, None),
    ("min_tokens", 0, None),
    ("max_tokens", 1, None),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", -1, None),
    ("prompt_logprobs", -1, None),
    ("prompt_logprob_start", 1, None),
    ("truncate_prompt_tokens", -1, MAX_LENGTH),
    ("stream_interval", 1, None),
)
"""Lowest and highest value; no highest if None."""

_OPTIONAL = frozenset(name for name, *_ in _INTEGERS) - {"n", "top_k", "min_tokens"}

_NUMBERS = (
    ("temperature", 0.0, None, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, None, True),
)
"""Lowest and highest value, and whether the lowest is excluded."""

_KINDS: dict[str, type] = {
    "structured_outputs": StructuredOutputs,
    "thinking_budget": ThinkingBudget,
    "output_kind": RequestOutputKind,
}
"""The class of a value."""

_MAX_FLOAT = sys.float_info.max


class _TokenIds(tuple[int, ...]):
    """Ids in their order; whether there is one among them takes no walk through all."""

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self)

    def __contains__(self, token: object) -> bool:
        """Whether there is an id; called for each new token, with ``stop_token_ids``."""
        return token in self._members


def _bias(name: str, bias: Mapping[int, float]) -> dict[int, float]:
    checked = {}
    for token, value in bias.items():
        # JSON has string keys only, so "42" is taken for 42.
        is_number = isinstance(token, str) and token.isdecimal() and len(token) <= 10
        token = int(token) if is_number else token
        _check_integer(name, token, 0, 2**32 - 1)
        _check_number(f"{name}[{token}]", value, -100.0, 100.0)
        checked[token] = float(value)
    return checked


def _rows(name: str, rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple([_ids(name, row) for row in rows])


_COLLECTIONS: dict[str, Callable[[str, Any], Any]] = {
    "stop": _strings,
    "stop_token_ids": _ids,
    "logit_bias": _bias,
    "bad_words": _strings,
    "bad_words_ids": _rows,
    "readout": _ids,
    "allowed_token_ids": _ids,
}
"""How each is checked and made immutable."""

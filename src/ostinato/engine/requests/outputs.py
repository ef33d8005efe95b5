"""The outputs that a caller gets, with vLLM's names.

One ``RequestOutput`` is the state of a request at one moment; a stream is a sequence of them, each
with all of the text so far.
"""

from array import array
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token.

    Attributes:
        logprob: Natural logarithm of its probability, before temperature and truncation.
        rank: 1 for the most likely token.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When things happened to a request, in seconds of the engine's clock.

    The clock only runs forward (``time.monotonic`` by default), so only differences are meaningful.
    Moments that have not happened are None.

    Attributes:
        arrival: The engine received the request.
        first_scheduled: The first step with a token of it began.
        first_token: Its first token was generated.
        last_token: Its newest token was generated.
        finished: Its last continuation ended.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    last_token: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds that it waited for its first step."""
        return _between(self.arrival, self.first_scheduled)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from its first step to its first token."""
        return _between(self.first_scheduled, self.first_token)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token: waiting and prefill."""
        return _between(self.arrival, self.first_token)

    @property
    def decode_time(self) -> float | None:
        """Seconds from its first token to its end."""
        return _between(self.first_token, self.finished)

    @property
    def total_time(self) -> float | None:
        """Seconds from its arrival to its end."""
        return _between(self.arrival, self.finished)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """``RequestTimings`` in the names of vLLM's ``RequestStateStats``, for programs that read them.

    All moments are in seconds of the engine's clock; those that have not happened are 0.0.
    """

    arrival_time: float  # the engine received the request
    queued_ts: float  # the same moment
    scheduled_ts: float  # its first step began
    first_token_ts: float  # its first generated token was there
    last_token_ts: float  # its newest generated token was there
    first_token_latency: float  # seconds from its arrival to its first token
    num_generation_tokens: int  # tokens generated so far, over all continuations


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Which of the request's ``n`` continuations.
        text: Its final text so far, without what may become a stop string and without an
            incomplete character. Empty with ``detokenize=False``.
        token_ids: All ids generated so far, with the one that ended it.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None while it runs.
        stop_reason: The stop string or stop id that ended it; None for the model's own
            end-of-sequence ids and for every other reason.
        logprobs: For each generated token, it and its alternatives by id, itself first; None unless
            asked for.
        cumulative_logprob: Sum over the generated tokens; None unless log-probabilities were
            asked for, or beams searched.
        readout: The hidden state or the logits that ``readout`` of its parameters names; None
            without one.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    readout: "array[float] | None" = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def since(self, earlier: "CompletionOutput") -> "CompletionOutput":
        """Return the part after an earlier output of this continuation."""
        num_tokens = len(earlier.token_ids)
        return replace(
            self,
            text=self.text[len(earlier.text) :],
            token_ids=self.token_ids[num_tokens:],
            logprobs=None if self.logprobs is None else self.logprobs[num_tokens:],
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request so far.

    Attributes:
        request_id: Name of the request.
        prompt: Its text; None if it was given as token ids.
        prompt_token_ids: Its ids; outputs of one request share the list.
        outputs: Its continuations in order, ``n`` of them.
        finished: Whether all of them have ended.
        timings: When things happened.
        prompt_logprobs: For each prompt token, it and its alternatives by id; None for the first
            token, and None instead of the list unless asked for.
        num_cached_tokens: Prompt tokens whose KV came from the cache when the request was first
            admitted, at most ``len(prompt_token_ids) - 1``.
        cached_tokens_from: Those tokens by where their KV came from: the ``pool``, the ``disk`` or
            a ``remote`` tier; without zero counts.
        num_copied_tokens: Those of them that were copied out of a block of which the prompt has
            only the beginning.
        num_waited_tokens: Those of them, in whole blocks, that another request computed while
            this one waited.
        num_kept_tokens: Prompt tokens of earlier answers that are kept as they were generated.
        num_drafted_tokens: Rows that were computed for drafts of its continuations.
        num_accepted_tokens: Tokens of the answer that were drafted.
        num_beam_tokens: Tokens that were computed for all beams of a search; 0 without one.
        error: Why it failed; None if it did not.
        has_own_error: Whether the error is the request's own: its parameters, such as a grammar
            that exceeds its limits, leave no token to sample.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    timings: RequestTimings
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    cached_tokens_from: dict[str, int] = field(default_factory=dict)
    num_copied_tokens: int = 0
    num_waited_tokens: int = 0
    num_kept_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_beam_tokens: int = 0
    error: str | None = None
    has_own_error: bool = False

    @property
    def metrics(self) -> RequestMetrics:
        """``timings`` in vLLM's names."""
        timings = self.timings
        return RequestMetrics(
            arrival_time=timings.arrival,
            queued_ts=timings.arrival,
            scheduled_ts=timings.first_scheduled or 0.0,
            first_token_ts=timings.first_token or 0.0,
            last_token_ts=timings.last_token or 0.0,
            first_token_latency=timings.time_to_first_token or 0.0,
            num_generation_tokens=sum(len(output.token_ids) for output in self.outputs),
        )

    def since(self, earlier: "RequestOutput | None") -> "RequestOutput":
        """Return the part after an earlier output of this request.

        Continuations without news are left out. ``metrics.num_generation_tokens`` counts the new
        tokens alone.
        """
        if earlier is None:
            return self
        pairs = zip(self.outputs, earlier.outputs, strict=True)
        return replace(self, outputs=[now.since(then) for now, then in pairs if now != then])


def _between(start: float | None, end: float | None) -> float | None:
    """Return the seconds between two moments; None before both have come."""
    return None if start is None or end is None else end - start

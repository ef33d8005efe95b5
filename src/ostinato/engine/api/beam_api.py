"""Beam search of a batch, offline, in vLLM's shape."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ostinato.core.sampling_params import Beams
from ostinato.engine.api.adapter_api import with_adapters
from ostinato.engine.loop.adapters import LoRARequest
from ostinato.engine.loop.batch import ShowProgress, run_batch
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from ostinato.engine.requests.prompts import PromptInput, parse_prompts
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched, with vLLM's names.

    Attributes:
        beam_width: Beams that go on after each token, and answers that are returned.
        max_tokens: Most tokens of an answer.
        ignore_eos: Go on after the model's end-of-sequence ids.
        temperature: 0 or 1, which are the same: beams are compared by the model's own
            log-probabilities.
        length_penalty: Exponent of an answer's length, by which its log-probability is divided.
        include_stop_str_in_output: Keep the end-of-sequence id in ``tokens`` and ``text``.
        early_stopping: As of ``Beams``.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def sampling_params(self) -> SamplingParams:
        """Return them for ``generate``, which returns the answers as continuations.

        Raises:
            InvalidSamplingParams: A value is out of range.
        """
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            beams=Beams(self.beam_width, self.length_penalty, self.early_stopping),
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer.

    Attributes:
        tokens: Ids of the prompt and the answer.
        logprobs: Of each token of the answer, by id.
        cum_logprob: Their sum.
        text: Of prompt and answer; None without a tokenizer.
        finish_reason: ``"stop"`` or ``"length"``.
        stop_reason: Always None: the model's own ids end beams.
        lora_request: The adapter that it was asked with.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt.

    Attributes:
        sequences: ``beam_width`` of them, the best first.
        request_id: Name of the request, for ``explain``.
        num_cached_tokens: Prompt tokens whose KV came from the cache.
    """

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    request_id: str = ""
    num_cached_tokens: int = 0


def beam_search(
    engine: Engine,
    prompts: PromptInput | Iterable[PromptInput],
    params: BeamSearchParams,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    use_tqdm: ShowProgress,
    concurrency_limit: int | None,
) -> list[BeamSearchOutput]:
    """Search the best answers to each prompt; see ``LLM.beam_search``."""
    if concurrency_limit is not None and concurrency_limit < 1:
        raise RequestError(f"concurrency_limit={concurrency_limit}: must be 1 or more, or None")
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params={params!r:.80}: must be BeamSearchParams")
    parsed, sampling = parse_prompts(prompts), params.sampling_params()
    if engine.loaded.tokenizer is None:
        sampling = replace(sampling, detokenize=False)
    parsed, outputs = with_adapters(engine, parsed, lora_request), list[RequestOutput]()
    size = concurrency_limit or max(1, len(parsed))
    for start in range(0, len(parsed), size):
        outputs += run_batch(engine, parsed[start : start + size], sampling, use_tqdm, None)
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(parsed)
    return [
        BeamSearchOutput(
            [_sequence(engine, output, part, params, adapter) for part in output.outputs],
            output.request_id,
            output.num_cached_tokens,
        )
        for output, adapter in zip(outputs, adapters, strict=True)
    ]


def _sequence(
    engine: Engine,
    output: RequestOutput,
    part: CompletionOutput,
    params: BeamSearchParams,
    adapter: LoRARequest | None,
) -> BeamSearchSequence:
    """Return an answer behind its prompt; without the id that ended it, as vLLM has it."""
    ids, table = part.token_ids, None if engine.texts is None else engine.texts.table
    if part.finish_reason == "stop" and not params.include_stop_str_in_output:
        ids = ids[:-1]
    tokens = [*output.prompt_token_ids, *ids]
    return BeamSearchSequence(
        tokens,
        part.logprobs or [],
        part.cumulative_logprob or 0.0,
        None if table is None else table.decode(tokens),
        part.finish_reason,
        part.stop_reason,
        adapter,
    )

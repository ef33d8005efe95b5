"""Prepares sampling parameters for a model, once for all prompts that share them.

A call with a thousand prompts passes one object of parameters. Checking its lists, spelling its bad
words and preparing its stop strings depends on that object alone, so it is done for the first
prompt. What was prepared is kept for as long as the object is alive, and until it is changed.
"""

import weakref
from dataclasses import dataclass

from ostinato.engine.requests.request_validation import closing_ids, resolve_params
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.text.stop_strings import StopStrings
from ostinato.runner.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """Sampling parameters as requests use them.

    Attributes:
        params: With bad words as ids; the forks and prompts of a request share it.
        stops: The stop strings, shared likewise.
        closing_ids: The closing mark of the ``thinking_budget``; empty without one.
    """

    params: SamplingParams
    stops: StopStrings
    closing_ids: tuple[int, ...] = ()


class ParamsPreparer:
    """Prepares sampling parameters for one engine. Thread-safe."""

    def __init__(self, loaded: LoadedModel, max_logprobs: int) -> None:
        self._loaded, self._max_logprobs = loaded, max_logprobs
        # With a copy of the parameters as they were: callers may change theirs.
        self._prepared: dict[int, tuple[SamplingParams, PreparedParams]] = {}

    def prepare(self, params: SamplingParams) -> PreparedParams:
        """Return prepared parameters; those of an object that was prepared before, at no cost.

        Raises:
            InvalidSamplingParams: As ``resolve_params``.
            MissingTokenizer: As ``resolve_params``, or a ``thinking_budget`` needs one.
        """
        known = self._prepared.get(id(params))
        if known is not None and known[0] == params:
            return known[1]
        resolved = resolve_params(params, self._loaded, self._max_logprobs)
        closing = closing_ids(resolved, self._loaded)
        prepared = PreparedParams(resolved, StopStrings(resolved.stop), closing)
        if known is None:
            weakref.finalize(params, self._prepared.pop, id(params), None).atexit = False
        self._prepared[id(params)] = (params.clone(), prepared)
        return prepared

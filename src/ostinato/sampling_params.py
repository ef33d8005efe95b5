"""vLLM's module of this name: sampling parameters."""

from ostinato.engine.grammar.structured_outputs import StructuredOutputs, StructuredOutputsParams
from ostinato.engine.requests.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams"]

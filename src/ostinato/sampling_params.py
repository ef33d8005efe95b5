"""vLLM's module of this name: sampling parameters."""

from ostinato.engine.sampling_params import RequestOutputKind, SamplingParams
from ostinato.engine.structured_outputs import StructuredOutputs, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams"]

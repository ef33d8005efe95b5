"""Requests whose answers have a known length."""

from ostinato import SamplingParams


def greedy(num_tokens: int) -> SamplingParams:
    """Return parameters of exactly so many tokens, which nobody reads as text."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)

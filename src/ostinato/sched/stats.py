"""Counters of the scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0  # steps that ran, failed ones included
    num_failed_steps: int = 0  # steps whose forward pass raised
    num_preemptions: int = 0  # times that a running sequence was preempted
    computed_prompt_tokens: int = 0  # prompt tokens that went through the model
    computed_output_tokens: int = 0  # generated tokens that went through the model
    waited_prompt_tokens: int = 0
    """Prompt tokens that hit in whole blocks at first admission, but were not there when the
    request came: another computed them meanwhile (single flight)."""

    def count_computed(self, start: int, stop: int, num_prompt_tokens: int) -> None:
        """Count the computed tokens of one sequence, positions ``start .. stop``."""
        prompt = max(0, min(stop, num_prompt_tokens) - start)
        self.computed_prompt_tokens += prompt
        self.computed_output_tokens += stop - start - prompt

"""Admission limits: whether a request can ever be served, and when it has gone far enough."""

from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.core.errors import EmptyPrompt, PromptTooLong
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence


def max_sequence_tokens(scheduler: SchedulerConfig, cache: CacheConfig) -> int:
    """Return the longest sequence, in tokens: the last token of all needs no slot."""
    return min(scheduler.max_model_len, cache.num_slots + 1)


def check_prompt(num_tokens: int, scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Refuse a prompt that could never be served.

    Raises:
        EmptyPrompt: It has no tokens.
        PromptTooLong: It leaves the model no room for an answer, or exceeds the pool.
    """
    if not num_tokens:
        raise EmptyPrompt("the prompt has no tokens: at least one is needed")
    if num_tokens >= scheduler.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, and max_model_len={scheduler.max_model_len} "
            "leaves no room for an answer: shorten the prompt, or raise max_model_len as far as "
            "the model goes"
        )
    if num_tokens > cache.num_slots:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens and needs {-(-num_tokens // cache.block_size)} "
            f"blocks of {cache.block_size}, but the pool has {cache.num_blocks}: shorten the "
            "prompt, or raise num_blocks or kv_cache_memory"
        )


def finish_reason(sequence: Sequence, max_tokens: int) -> FinishReason | None:
    """Say whether a sequence ends with the token it just got.

    Args:
        sequence: With its newest token appended; a stop id is noted as ``stop_reason``.
        max_tokens: The longest sequence, prompt and output together.
    """
    params, token = sequence.request.params, sequence.key.tokens[-1]
    if token in params.stop_token_ids:
        sequence.stop_reason = token
        return FinishReason.STOP
    if not params.ignore_eos and token in sequence.request.eos_token_ids:
        return FinishReason.STOP
    if sequence.constraint is not None and sequence.constraint.is_complete:
        return FinishReason.STOP
    if params.max_tokens is not None and sequence.num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.LENGTH if sequence.num_tokens >= max_tokens else None

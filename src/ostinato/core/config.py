"""Settings of the cache and the scheduler; ``ostinato.settings`` adds those of the satellites."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ostinato.core.errors import ConfigError

WaitingOrder = Literal["fcfs", "shortest_first", "longest_prefix", "fair_share"]
_REMOVED_ORDERS = {"depth_first": "removed, and compared by benchmarks/orders.py; "}


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How prefixes are kept.

    Attributes:
        num_blocks: Blocks in the pool, at least 1.
        block_size: Tokens per block, at least 1.
        enable_prefix_caching: Off, nothing is published and nothing hits.
        seal_tails: Publish the partial last block of a sequence that ended, to be found token
            by token.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    seal_tails: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError where a value is out of range."""
        at_least("num_blocks", self.num_blocks, 1)
        at_least("block_size", self.block_size, 1)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How each step's tokens are chosen.

    Attributes:
        max_num_batched_tokens: Token budget of one step; longer prompts are computed in chunks.
        max_chunk_tokens: Most tokens of one prompt in a step; with None, a prompt may take all
            that decodes leave of the budget.
        max_step_ms: Milliseconds that a step may take while others wait for it, as far as that
            wastes little of the prompt rate; with None, steps are bounded by tokens alone.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of a sequence, prompt and output together.
        order: Within a priority, first come, first served, or an order of ``ostinato.scheduling``.
        max_overtakes: Except with ``fcfs``, how many later requests may be admitted before a
            waiting one; then it goes first. With ``fair_share``, before the first of a tenant.
    """

    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_step_ms: int | None = None
    max_num_seqs: int = 256
    max_model_len: int = 2**31
    order: WaitingOrder = "fcfs"
    max_overtakes: int = 64

    def __post_init__(self) -> None:
        """Raise ConfigError where a value is out of range, or the budget too small for decodes."""
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_chunk_tokens is not None:
            at_least("max_chunk_tokens", self.max_chunk_tokens, 1)
        if self.max_step_ms is not None:
            at_least("max_step_ms", self.max_step_ms, 1)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_model_len", self.max_model_len, 1)
        at_least("max_overtakes", self.max_overtakes, 0)
        one_of("order", self.order, get_args(WaitingOrder), _REMOVED_ORDERS)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token of "
                "the budget in every step; raise the one or lower the other"
            )


def at_least(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless a setting is an integer, and not below its minimum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: must be an integer, at least {least}")


def one_of(
    name: str, value: object, choices: tuple[str, ...], removed: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError unless a setting is one of its choices; ``removed`` are earlier ones."""
    where = (removed or {}).get(str(value), "")
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: {where}must be one of {', '.join(choices)}")

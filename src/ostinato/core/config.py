"""Settings of the cache and the scheduler; ``ostinato.settings`` adds those of the satellites."""

from dataclasses import dataclass
from typing import Literal

from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, setting

WaitingOrder = Literal["fcfs", "shortest_first", "longest_prefix", "fair_share"]
_REMOVED = "depth_first is compared in docs/experiments.md alone"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How prefixes are kept."""

    num_blocks: int = setting(minimum=1)
    """Blocks in the pool."""
    block_size: int = setting(16, minimum=1)
    """Tokens per block."""
    enable_prefix_caching: bool = setting(True, old_options=("--cache/--no-cache",))
    """Cache and reuse prefixes; off, every prompt is computed in full."""
    seal_tails: bool = setting(True)
    """Publish the last, partial block of an ended sequence, which then matches token by token."""

    def __post_init__(self) -> None:
        """Raise ConfigError where a value is out of range."""
        check_settings(self)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How each step's tokens are chosen."""

    max_num_batched_tokens: int = setting(2048, minimum=1)
    """Maximum tokens computed per step; longer prompts are computed in chunks."""
    max_chunk_tokens: int | None = setting(None, minimum=1)
    """Maximum tokens of one prompt per step; else all that decodes leave of the budget and
    ``max_step_ms`` allows."""
    max_step_ms: int | None = setting(
        None, minimum=1, page="rooms/scheduling.md#steps-bounded-by-time"
    )
    """Milliseconds that a step may take while other requests decode or wait. Where smaller steps
    would lose more than a tenth of the prompt rate, they are longer; a prompt that is alone is
    computed in steps of the fastest length. ``LLM`` has 10,000 by default."""
    max_num_seqs: int = setting(256, minimum=1)
    """Maximum number of running sequences."""
    max_model_len: int = setting(2**31, minimum=1)
    """Maximum tokens of a sequence, prompt and output together."""
    order: WaitingOrder = setting("fcfs", page="rooms/scheduling.md#shortest-first", hint=_REMOVED)
    """Waiting order within a priority. ``shortest_first``: least left to compute; ``fcfs``: by
    arrival; ``longest_prefix``: most cached tokens; ``fair_share``: the tenant that was served
    least."""
    max_overtakes: int = setting(64, minimum=0)
    """How many later requests may be admitted before a waiting one, except with ``fcfs``; then it
    goes first. With ``fair_share``, before the first of a tenant."""

    def __post_init__(self) -> None:
        """Raise ConfigError where a value is out of range, or the budget too small for decodes."""
        check_settings(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token of "
                "the budget in every step; raise the one or lower the other"
            )


def check_minimum(name: str, value: object, minimum: int) -> None:
    """Raise ConfigError unless a number is an integer, and not below its minimum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name}={value!r}: must be an integer, at least {minimum}")


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless a value is one of its choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(choices)}")

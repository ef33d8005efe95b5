"""Settings of the cache and the scheduler.

The engine derives them from its own settings (model, device, memory), in ``engine.config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ostinato.core.errors import ConfigError

IndexName = Literal["radix", "hash"]
FreeOrder = Literal["scratch_first", "classic"]
DigestName = Literal["sha256", "xxh3_128"]
PolicyName = Literal["lru", "s3fifo", "arc", "reuse_hazard"]
WaitingOrder = Literal["fcfs", "longest_prefix", "depth_first", "fair_share"]


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """A group of layers with a sliding window.

    Attributes:
        window: Tokens that a query sees, itself included, at least 1.
        num_blocks: Blocks of its own pool: at least as many as one sequence needs to continue.
    """

    window: int
    num_blocks: int

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range.
        """
        at_least("window", self.window, 1)
        at_least("num_blocks of a window", self.num_blocks, 1)


@dataclass(frozen=True, slots=True)
class Allotment:
    """A tenant's share of the pool, in blocks.

    Attributes:
        floor: Blocks that no other tenant can evict.
        quota: Blocks that it may keep; above that it evicts its own first. None is no bound.
    """

    floor: int = 0
    quota: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: A bound is no integer or negative, or the floor is above the quota.
        """
        for name, bound in (("floor", self.floor), ("quota", self.quota or 0)):
            if not isinstance(bound, int) or isinstance(bound, bool):
                raise ConfigError(f"{name}={bound!r}: must be an integer, in blocks")
        if self.floor < 0 or (self.quota is not None and self.quota < 1):
            raise ConfigError(
                f"floor={self.floor}, quota={self.quota}: a floor is at least 0 and a quota at "
                "least 1 block"
            )
        if self.quota is not None and self.floor > self.quota:
            raise ConfigError(
                f"floor={self.floor} is above quota={self.quota}: lower the one or raise the other"
            )


_GHOST_BLOCKS = 128
GHOST_MIN_POOL_BLOCKS = 64
"""Blocks of the smallest pool for which estimates are made without being asked for."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How prefixes are kept.

    Attributes:
        num_blocks: Blocks in the pool, at least 1.
        block_size: Tokens per block, at least 1.
        index: ``radix`` walks a tree and compares tokens; ``hash`` looks up chained digests.
        free_order: ``scratch_first`` gives away blocks without content before any cached one;
            ``classic`` appends every freed block to one queue, as vLLM's document draws it.
        policy: Which cached block is worth least.
        digest: Content hash of the hash index.
        enable_prefix_caching: Off, nothing is published and nothing hits.
        seal_tails: Publish the partial last block of a sequence that ended, to be found token
            by token.
        windows: Groups of layers with a sliding window, each with a pool of its own.
        allotments: Floors and quotas, in blocks of the full-attention pool, by tenant.
        reserved_blocks: Blocks that neither floors nor leases may bind: as many as the longest
            sequence needs, so that it can always run.
        keep_event_batches: Batches of events kept for consumers that missed some; 0 keeps no
            events at all.
        ghost_blocks: The most blocks of the small cache that stands for this one in estimates for
            other sizes and policies; 0 makes no estimates, None takes 128 where there are 64
            blocks or more.
        ghost_share: Processor time that estimates take in the long run, about, as a share of
            what the cache takes; 1 samples all the time.
        keep_explanations: Sequences of which is remembered what becomes of them, so that misses
            can be explained; 0 remembers nothing.
    """

    num_blocks: int
    block_size: int = 16
    index: IndexName = "radix"
    free_order: FreeOrder = "scratch_first"
    policy: PolicyName = "lru"
    digest: DigestName = "sha256"
    enable_prefix_caching: bool = True
    seal_tails: bool = True
    windows: tuple[WindowConfig, ...] = ()
    allotments: Mapping[bytes, Allotment] = field(default_factory=dict)
    reserved_blocks: int = 0
    keep_event_batches: int = 0
    ghost_blocks: int | None = None
    ghost_share: float = 0.01
    keep_explanations: int = 1000

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range or unknown, or floors bind too much.
        """
        at_least("num_blocks", self.num_blocks, 1)
        at_least("reserved_blocks", self.reserved_blocks, 0)
        at_least("ghost_blocks", self.num_ghost_blocks, 0)
        if not 0 < self.ghost_share <= 1:
            raise ConfigError(
                f"ghost_share={self.ghost_share!r}: must be above 0 and at most 1; "
                "ghost_blocks=0 makes no estimates"
            )
        at_least("keep_event_batches", self.keep_event_batches, 0)
        at_least("keep_explanations", self.keep_explanations, 0)
        self._check_windows()
        self._check_floors()
        at_least("block_size", self.block_size, 1)
        one_of("index", self.index, get_args(IndexName))
        one_of("free_order", self.free_order, get_args(FreeOrder))
        one_of("policy", self.policy, get_args(PolicyName))
        one_of("digest", self.digest, get_args(DigestName))

    @property
    def num_ghost_blocks(self) -> int:
        """The most blocks of a small cache; 0 without estimates."""
        if self.ghost_blocks is not None:
            return self.ghost_blocks
        return _GHOST_BLOCKS if self.num_blocks >= GHOST_MIN_POOL_BLOCKS else 0

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bindable(self) -> int:
        """Blocks that floors and leases together may bind."""
        return max(0, self.num_blocks - self.reserved_blocks)

    def quota_of(self, tenant: bytes) -> int | None:
        """Return the blocks that a tenant may keep; None is no bound."""
        return self.allotments[tenant].quota if tenant in self.allotments else None

    def _check_windows(self) -> None:
        for window in self.windows:
            least = window_blocks(window.window, self.block_size)
            if window.num_blocks < least:
                raise ConfigError(
                    f"a sliding window of {window.window} tokens needs {least} blocks of "
                    f"{self.block_size} for one sequence, but its pool has {window.num_blocks}: "
                    "raise num_blocks or kv_cache_memory"
                )

    def _check_floors(self) -> None:
        floors = sum(allotment.floor for allotment in self.allotments.values())
        if floors > self.num_bindable:
            raise ConfigError(
                f"the floors of all tenants sum to {floors} blocks, but only {self.num_bindable} "
                f"of num_blocks={self.num_blocks} may be bound: {self.reserved_blocks} are "
                "reserved for the longest sequence; lower floors or max_model_len, or raise "
                "num_blocks"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How each step's tokens are chosen.

    Attributes:
        max_num_batched_tokens: Token budget of one step; longer prompts are computed in chunks.
        max_chunk_tokens: Most tokens of one prompt in a step; with None, a prompt may take all
            that decodes leave of the budget, and no request is admitted until it is computed.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of a sequence, prompt and output together.
        order: Within a priority, ``fcfs`` is first come, first served; ``longest_prefix`` prefers
            requests whose prefix is cached; ``depth_first`` serves those that share a prefix
            one after another; ``fair_share`` prefers the tenant that was served least.
        max_overtakes: Except with ``fcfs``, how many later requests may be admitted before a
            waiting one; then it goes first. With ``fair_share``, before the first of a tenant.
    """

    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int = 2**31
    order: WaitingOrder = "fcfs"
    max_overtakes: int = 64

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range, or decodes alone could exceed the budget.
        """
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_chunk_tokens is not None:
            at_least("max_chunk_tokens", self.max_chunk_tokens, 1)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_model_len", self.max_model_len, 1)
        at_least("max_overtakes", self.max_overtakes, 0)
        one_of("order", self.order, get_args(WaitingOrder))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token of "
                "the budget in every step; raise the one or lower the other"
            )


def window_blocks(window: int, block_size: int) -> int:
    """Return the blocks that one sequence needs of a window group to compute its next token."""
    return -(-(window - 1) // block_size) + 1


def at_least(name: str, value: object, least: int) -> None:
    """Check that a setting is an integer and not below its minimum.

    Raises:
        ConfigError: Naming the setting, its value and the limit.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: must be an integer, at least {least}")


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a setting is one of its choices.

    Raises:
        ConfigError: Naming the setting, its value and the choices.
    """
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(choices)}")

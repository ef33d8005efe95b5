"""Settings of a prefix cache with all that ``assembly`` builds around it.

The heart reads ``CacheConfig`` alone; the engine derives all of them from its own settings (model,
device, memory), in ``engine.config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ostinato.core.config import CacheConfig
from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, setting
from ostinato.former_names import accept_old_names

KeepReasoning = Literal["template", "always"]
"""Whether the reasoning of earlier turns is dropped where the chat template drops it."""

FreeOrder = Literal["unused_first", "classic"]
IndexName = Literal["radix", "hash"]
DigestName = Literal["sha256", "xxh3_128"]
PolicyName = Literal["lru", "reuse_hazard"]
_COMPARED = "s3fifo, arc, lfu, slru and cost_aware are compared in docs/eviction.md alone"
CheckpointPlacement = Literal["where_prompts_part", "prompt_end", "every_unit"]

GHOST_MIN_POOL_BLOCKS = 64
"""Blocks of the smallest pool that has estimates by default."""

_GHOST_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """A group of layers with a sliding window."""

    window: int = setting(minimum=1)
    """Tokens that a query sees, itself included."""
    num_blocks: int = setting(minimum=1)
    """Blocks of its own pool: at least as many as one sequence needs to continue."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        check_settings(self)


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The layers that keep a state of fixed size per sequence."""

    num_slots: int = setting(minimum=2)
    """States of the pool: of running sequences and of checkpoints together."""
    unit: int = setting(64, minimum=1)
    """Checkpoints are at multiples of this number, and prefills are cut there: the chunk of the
    models' own kernels, and a multiple of the block."""
    sparse_checkpoints: int = setting(1, minimum=0)
    """Checkpoints of one prompt besides those at its end and where it branches off from another;
    each costs a cut of the prefill."""
    placement: CheckpointPlacement = setting("where_prompts_part")
    """``where_prompts_part``: at their ends and at sparse positions; the others are for comparison:
    ``prompt_end`` alone, or ``every_unit`` of a prompt, both under LRU."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        check_settings(self)


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's share of the pool, in blocks."""

    guaranteed: int = setting(0, minimum=0, kind="an integer, in blocks, at least 0")
    """Blocks that no other tenant can evict."""
    quota: int | None = setting(None, minimum=1, kind="an integer, in blocks, at least 1")
    """Blocks that it may keep; above that it evicts its own first. None is no bound."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a bound is out of range, or the guarantee is above the quota."""
        check_settings(self)
        if self.quota is not None and self.guaranteed > self.quota:
            raise ConfigError(
                f"guaranteed={self.guaranteed} is above quota={self.quota}: lower the "
                "one or raise the other"
            )


def check_policy(name: str, value: str) -> None:
    """Raise ConfigError unless a value is the name of an eviction policy."""
    if value not in get_args(PolicyName):
        choices = ", ".join(get_args(PolicyName))
        raise ConfigError(f"{name}={value!r}: must be one of {choices}; {_COMPARED}")


@accept_old_names
@dataclass(frozen=True, slots=True)
class PrefixCacheConfig(CacheConfig):
    """How prefixes are kept: the index, the eviction policy, and what is recorded."""

    free_order: FreeOrder = setting("unused_first")
    """Which free block is allocated first: ``unused_first`` takes blocks without content before any
    cached one; ``classic`` takes the block that has been free for longest, as in vLLM's document.
    """
    index: IndexName = setting("radix")
    """Prefix index: ``radix`` (a tree) or ``hash`` (chained digests); both match the same blocks.
    """
    eviction_policy: PolicyName = setting(
        "lru", page="eviction.md", old_names=("policy",), hint=_COMPARED
    )
    """Eviction policy: which cached block is evicted first."""
    digest: DigestName = setting("sha256")
    """Content digest of the hash index."""
    windows: tuple[WindowConfig, ...] = ()
    """Groups of layers with a sliding window, each with a pool of its own."""
    states: StateConfig | None = None
    """The layers that keep a state, if there are any."""
    tenant_shares: Mapping[bytes, TenantShare] = field(default_factory=dict)
    """Guarantees and quotas, in blocks of the full-attention pool, by tenant."""
    reserved_blocks: int = setting(0, minimum=0)
    """Blocks that neither guarantees nor leases may bind, so that the longest sequence can always
    run."""
    keep_event_batches: int = setting(0, minimum=0)
    """Batches of KV events kept for consumers that missed some; 0 makes no events."""
    ghost_blocks: int | None = setting(None, minimum=0, page="eviction.md#the-ghost")
    """Maximum blocks of the small caches that estimate what other sizes and policies would hit; 0
    makes no estimates, and by default they have 128 where the cache has 64 or more."""
    ghost_share: float = setting(0.01, above=0, maximum=1, hint="ghost_blocks=0 makes no estimates")
    """Processor time of these estimates in the long run, as a share of the cache's; 1 samples all
    the time."""
    keep_explanations: int = setting(1000, minimum=0, page="explain.md")
    """Sequences that are remembered so that misses can be explained; 0 remembers none."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range or unknown, or guarantees bind too much."""
        check_settings(self)
        self._check_windows()
        if self.states is not None and self.states.unit % self.block_size:
            raise ConfigError(
                f"block_size={self.block_size}: the model keeps states, at multiples of "
                f"{self.states.unit} tokens; choose a block size that divides {self.states.unit}"
            )
        self._check_guarantees()

    @property
    def num_ghost_blocks(self) -> int:
        """The most blocks of a small cache; 0 without estimates."""
        if self.ghost_blocks is not None:
            return self.ghost_blocks
        return _GHOST_BLOCKS if self.num_blocks >= GHOST_MIN_POOL_BLOCKS else 0

    @property
    def max_guaranteed_blocks(self) -> int:
        """Blocks that guarantees and leases together may bind."""
        return max(0, self.num_blocks - self.reserved_blocks)

    def quota_of(self, tenant: bytes) -> int | None:
        """Return the blocks that a tenant may keep; None is no bound."""
        return self.tenant_shares[tenant].quota if tenant in self.tenant_shares else None

    def _check_windows(self) -> None:
        for window in self.windows:
            min_blocks = window_blocks(window.window, self.block_size)
            if window.num_blocks < min_blocks:
                raise ConfigError(
                    f"a sliding window of {window.window} tokens needs {min_blocks} blocks of "
                    f"{self.block_size} for one sequence, but its pool has {window.num_blocks}: "
                    "raise num_blocks or kv_cache_memory"
                )

    def _check_guarantees(self) -> None:
        guarantees = sum(share.guaranteed for share in self.tenant_shares.values())
        if guarantees > self.max_guaranteed_blocks:
            raise ConfigError(
                f"the guarantees of all tenants sum to {guarantees} blocks, but only "
                f"{self.max_guaranteed_blocks} of num_blocks={self.num_blocks} may be bound: "
                f"{self.reserved_blocks} are reserved for the longest sequence; lower guarantees "
                "or max_model_len, or raise num_blocks"
            )


def window_blocks(window: int, block_size: int) -> int:
    """Return the blocks that one sequence needs of a window group to compute its next token."""
    return -(-(window - 1) // block_size) + 1

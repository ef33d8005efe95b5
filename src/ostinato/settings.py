"""Settings of a prefix cache with all that ``assembly`` builds around it.

The heart reads ``CacheConfig`` alone; the engine derives all of them from its own settings (model,
device, memory), in ``engine.config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ostinato.core.config import CacheConfig, at_least, one_of
from ostinato.core.errors import ConfigError

FreeOrder = Literal["unused_first", "classic"]
IndexName = Literal["radix", "hash"]
DigestName = Literal["sha256", "xxh3_128"]
PolicyName = Literal["lru", "reuse_hazard"]
CheckpointPlacement = Literal["where_prompts_part", "prompt_end", "every_unit"]

GHOST_MIN_POOL_BLOCKS = 64
"""Blocks of the smallest pool that has estimates by default."""

_GHOST_BLOCKS = 128


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
class StateConfig:
    """The layers that keep a state of fixed size per sequence.

    Attributes:
        num_slots: States of the pool: of running sequences and of checkpoints together.
        unit: Checkpoints are at multiples of so many tokens, and prefills are cut there: the chunk
            of the models' own kernels, and a multiple of the block.
        sparse_checkpoints: Checkpoints of one prompt besides those at its end and where it branches
            off from another; each costs a cut of the prefill.
        placement: ``where_prompts_part``, at their ends and at sparse positions; the others are
            for comparison: ``prompt_end`` alone, or ``every_unit`` of a prompt, both under LRU.
    """

    num_slots: int
    unit: int = 64
    sparse_checkpoints: int = 1
    placement: CheckpointPlacement = "where_prompts_part"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range.
        """
        at_least("num_slots of states", self.num_slots, 2)
        at_least("unit of states", self.unit, 1)
        at_least("sparse_checkpoints", self.sparse_checkpoints, 0)
        one_of("placement", self.placement, get_args(CheckpointPlacement))


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's share of the pool, in blocks.

    Attributes:
        guaranteed: Blocks that no other tenant can evict.
        quota: Blocks that it may keep; above that it evicts its own first. None is no bound.
    """

    guaranteed: int = 0
    quota: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: A bound is no integer or negative, or the guarantee is above the quota.
        """
        bounds = ("guaranteed", self.guaranteed), ("quota", self.quota or 0)
        for name, bound in bounds:
            if not isinstance(bound, int) or isinstance(bound, bool):
                raise ConfigError(f"{name}={bound!r}: must be an integer, in blocks")
        if self.guaranteed < 0 or (self.quota is not None and self.quota < 1):
            raise ConfigError(
                f"guaranteed={self.guaranteed}, quota={self.quota}: a guarantee is at "
                "least 0 and a quota at least 1 block"
            )
        if self.quota is not None and self.guaranteed > self.quota:
            raise ConfigError(
                f"guaranteed={self.guaranteed} is above quota={self.quota}: lower the "
                "one or raise the other"
            )


_REMOVED_POLICIES = dict.fromkeys(
    ("s3fifo", "arc", "lfu", "slru", "cost_aware"),
    "removed, and compared by benchmarks/eviction.py; ",
)


def check_policy(setting: str, name: str) -> None:
    """Raise ConfigError unless it is the name of an eviction policy."""
    one_of(setting, name, get_args(PolicyName), _REMOVED_POLICIES)


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig(CacheConfig):
    """How prefixes are kept: the index, the eviction policy, and what is recorded.

    Attributes:
        free_order: ``unused_first`` allocates blocks without content before any cached one;
            ``classic`` appends every freed block to one queue, as in vLLM's document.
        index: ``radix`` walks a tree and compares tokens; ``hash`` looks up chained digests.
        policy: Which cached block is evicted first.
        digest: Content hash of the hash index.
        windows: Groups of layers with a sliding window, each with a pool of its own.
        states: The layers that keep a state, if there are any.
        tenant_shares: Guarantees and quotas, in blocks of the full-attention pool, by tenant.
        reserved_blocks: Blocks that neither guarantees nor leases may bind, so that the longest
            sequence can always run.
        keep_event_batches: Batches of events kept for consumers that missed some; 0 keeps no
            events at all.
        ghost_blocks: The most blocks of the small cache that simulates this one in estimates for
            other sizes and policies; 0 makes no estimates, None takes 128 where there are 64
            blocks or more.
        ghost_share: Processor time of estimates in the long run, about, as a share of the cache's;
            1 samples all the time.
        keep_explanations: Sequences that are remembered so that misses can be explained; 0
            remembers nothing.
    """

    free_order: FreeOrder = "unused_first"
    index: IndexName = "radix"
    policy: PolicyName = "lru"
    digest: DigestName = "sha256"
    windows: tuple[WindowConfig, ...] = ()
    states: StateConfig | None = None
    tenant_shares: Mapping[bytes, TenantShare] = field(default_factory=dict)
    reserved_blocks: int = 0
    keep_event_batches: int = 0
    ghost_blocks: int | None = None
    ghost_share: float = 0.01
    keep_explanations: int = 1000

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range or unknown, or guarantees bind too much.
        """
        CacheConfig.__post_init__(self)  # super() does not know a class with slots
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
        if self.states is not None and self.states.unit % self.block_size:
            raise ConfigError(
                f"block_size={self.block_size}: the model keeps states, at multiples of "
                f"{self.states.unit} tokens; choose a block size that divides {self.states.unit}"
            )
        self._check_guarantees()
        one_of("free_order", self.free_order, get_args(FreeOrder))
        one_of("index", self.index, get_args(IndexName))
        check_policy("policy", self.policy)
        one_of("digest", self.digest, get_args(DigestName))

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
            least = window_blocks(window.window, self.block_size)
            if window.num_blocks < least:
                raise ConfigError(
                    f"a sliding window of {window.window} tokens needs {least} blocks of "
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

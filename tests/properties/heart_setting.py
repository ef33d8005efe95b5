"""In what kind of world is the whole heart tried, and what may somebody wish for?"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.core.config import (
    Allotment,
    CacheConfig,
    FreeOrder,
    IndexName,
    PolicyName,
    SchedulerConfig,
    WaitingOrder,
    WindowConfig,
    window_blocks,
)


@dataclass(frozen=True)
class Setting:
    """What kind of world.

    Attributes:
        num_blocks: Of the full-attention group.
        reserved: Of them, blocks that neither floors nor leases may bind.
        windows: Size of each window, and its pool's blocks beyond the fewest possible.
        allotments: Floor and quota by tenant.
        seats: Sequences that run at once.
        spare_budget: Tokens of a step beyond one per seat.
    """

    num_blocks: int
    block_size: int
    reserved: int
    windows: tuple[tuple[int, int], ...] = ()
    allotments: Mapping[str, Allotment] = field(default_factory=dict)
    index: IndexName = "radix"
    free_order: FreeOrder = "scratch_first"
    policy: PolicyName = "lru"
    seal_tails: bool = True
    enable_prefix_caching: bool = True
    seats: int = 4
    spare_budget: int = 4
    max_chunk_tokens: int | None = None
    order: WaitingOrder = "fcfs"

    @property
    def cache(self) -> CacheConfig:
        """Settings of the cache."""
        size = self.block_size
        return CacheConfig(
            self.num_blocks,
            size,
            self.index,
            self.free_order,
            self.policy,
            seal_tails=self.seal_tails,
            enable_prefix_caching=self.enable_prefix_caching,
            windows=tuple(
                WindowConfig(w, window_blocks(w, size) + more) for w, more in self.windows
            ),
            allotments={tenant.encode(): a for tenant, a in self.allotments.items()},
            reserved_blocks=self.reserved,
            keep_event_batches=4,
        )

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings of the scheduler; the longest sequence fits the reserved blocks."""
        return SchedulerConfig(
            max_num_batched_tokens=self.seats + self.spare_budget,
            max_num_seqs=self.seats,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=self.reserved * self.block_size + 1,
            order=self.order,
            max_overtakes=2,
        )


@dataclass(frozen=True)
class Wish:
    """What somebody sends, but for the prompt; as in ``make_request``.

    Attributes:
        tenant: Number of a tenant; None is whose the beginning of the prompt was.
        image: Start and length of an image; none if it does not fit.
    """

    n: int = 1
    max_tokens: int | None = 3
    priority: int = 0
    tenant: int | None = None
    reads: bool = True
    writes: bool = True
    prompt_logprobs: bool = False
    eos: str = ""
    image: tuple[int, int] | None = None

"""What is sent, and what runs?"""

from dataclasses import dataclass, field

from ostinato.cache.block_table import BlockTable
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from tests.properties.oracle import Table


@dataclass(frozen=True)
class Prompt:
    """What somebody sends."""

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    identity: Identity = field(default_factory=Identity)
    reads: bool = True
    writes: bool = True

    def key(self) -> PrefixKey:
        """Return a new key; each cache remembers digests in its own."""
        return PrefixKey(self.identity, self.tokens, self.images)


@dataclass(eq=False)
class Live:
    """A sequence on one side; without a table while it waits.

    Attributes:
        number: The same on both sides.
        key: Its tokens so far.
        reads: Whether it may hit.
        writes: Whether it publishes.
        values: What its KV should be, one per token.
        table: Its blocks.
        expected: Its blocks according to the oracle.
        num_computed: Leading tokens whose KV is written.
        planned: The same after the running step; None if that does not compute it.
        is_published: Whether the step's full blocks are findable.
        is_cancelled: Whether it ends with the step.
        was_preempted: Whether it has run before.
    """

    number: int
    key: PrefixKey
    reads: bool
    writes: bool
    values: list[int]
    table: BlockTable | None = None
    expected: Table | None = None
    num_computed: int = 0
    planned: int | None = None
    is_published: bool = False
    is_cancelled: bool = False
    was_preempted: bool = False

    @property
    def in_step(self) -> bool:
        """Whether the running step computes it, or made it."""
        return self.planned is not None

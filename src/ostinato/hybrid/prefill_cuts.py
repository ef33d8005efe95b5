"""Where a prefill is cut so that its state can be kept.

A state exists only at the end of a chunk, so a state that is worth keeping costs a cut::

    cached     ████████████ 1,600 tokens of keys and values; the states of 0 and 2,176
    prompt     ████████████░░░░░░░░  2,200
    cuts                   ┊      ┊
                         1,600  2,176        where the two part, and its own end

* where prompts branch off: at the end of the cached blocks of a prompt that hits less, and where
  waiting prompts that share a prefix with this one leave it;
* at a prompt's end, the last multiple of ``unit`` before its last token;
* at a few positions between, where later prompts are likely to branch off (``placement``).

Positions are multiples of ``unit``: 64 tokens, the chunk of the models' own kernels, so that the
result is the same to the bit wherever a prompt is cut; and of the block, since a state is found by
the block before it.
"""

from bisect import bisect_right
from collections.abc import Iterable

from ostinato.cache.block_table import BlockTable
from ostinato.core.identity import PrefixKey
from ostinato.hybrid.checkpoint import HeldStates
from ostinato.hybrid.placement import Placement, place
from ostinato.settings import StateConfig

MAX_WAITING_CUTS = 4
"""The most positions at which one prefill is cut for waiting prompts."""


class StateCuts:
    """Where the prefills of a model with states are cut.

    Attributes:
        unit: Positions are multiples of it.
        keeps_answers: Whether a state is kept at a request's end as well.
    """

    def __init__(self, config: StateConfig, placement: Placement, place_of_states: int) -> None:
        """Cut as configured; states are at index ``place_of_states`` of ``BlockTable.held``."""
        self.unit = config.unit
        self.keeps_answers = config.placement == "where_prompts_part"
        self._config = config
        self._placement = placement
        self._place = place_of_states

    def plan(
        self, held: HeldStates, num_tokens: int, num_seen: int, num_hit: int, has_unused: bool
    ) -> None:
        """Note where a prompt's prefill is to be cut.

        Args:
            held: Of the sequence.
            num_tokens: Of the prompt.
            num_seen: Tokens whose blocks are cached.
            num_hit: Tokens that hit.
            has_unused: Whether there are slots without content.
        """
        ends = {self._floor(num_tokens - 1)}
        first, last = num_hit // self.unit + 1, (num_tokens - 1) // self.unit
        if self._config.placement == "every_unit":
            ends.update(depth * self.unit for depth in range(first, last + 1))
        elif self._config.placement == "where_prompts_part":
            ends.add(self._floor(max(num_seen, num_hit)))
            ends.update(
                depth * self.unit for depth in self._placement.choose(first, last, has_unused)
            )
        held.cuts = sorted(end for end in ends if end > num_hit)

    def end_of_chunk(
        self, table: BlockTable, start: int, end: int, waiting: Iterable[PrefixKey]
    ) -> int:
        """Return where a chunk from ``start`` ends, at ``end`` or before; ``start`` if nowhere."""
        held = self._held(table)
        if table.writes:
            if self.keeps_answers:
                self._cut_for(held, table.key, start, waiting)
            following = bisect_right(held.cuts, start)
            if following < len(held.cuts) and held.cuts[following] <= end:
                return held.cuts[following]
        return end if end == len(table.key) else max(start, self._floor(end))

    def deepest_state(self, table: BlockTable, num_tokens: int) -> int:
        """Return the last position up to ``num_tokens`` of which a state is being computed."""
        cuts = self._held(table).cuts
        following = bisect_right(cuts, num_tokens)
        return cuts[following - 1] if following else 0

    def _cut_for(
        self, held: HeldStates, key: PrefixKey, start: int, waiting: Iterable[PrefixKey]
    ) -> None:
        """Cut also where most of the waiting prompts leave this one."""
        known, counts = set(held.cuts), dict[int, float]()
        for other in waiting:
            common = min(key.num_common_tokens(other), len(key) - 1, len(other) - 1)
            end = self._floor(common)
            if end > start and end not in known:
                counts[end // self.unit] = counts.get(end // self.unit, 0.0) + 1.0
        if counts:
            chosen = place(sorted(counts.items()), start // self.unit, MAX_WAITING_CUTS)
            held.cuts = sorted(known.union(depth * self.unit for depth in chosen))

    def _floor(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.unit

    def _held(self, table: BlockTable) -> HeldStates:
        held = table.held[self._place]
        assert isinstance(held, HeldStates)
        return held

"""``TierChain``: several tiers as one: look-ups ask them in order, stores go to all."""

from collections.abc import Sequence
from itertools import chain

from ostinato.tiers import port
from ostinato.tiers.retention import ReuseClass


class TierChain:
    """Tiers of different names, the fastest first; see ``KVTier``."""

    name = "tiers"

    def __init__(self, tiers: Sequence[port.KVTier]) -> None:
        self.tiers = list(tiers)
        self._by_name = {tier.name: tier for tier in tiers}
        assert len(self._by_name) == len(self.tiers), "two tiers have one name"

    def look_up(self, prefix: port.Prefix, start: int) -> list[port.ExtentRef]:
        """Let each tier continue what those before it found.

        In a sparse namespace runs of several tiers may overlap; those of the fastest come first.
        """
        if prefix.namespace.is_sparse:
            return [ref for tier in self.tiers for ref in tier.look_up(prefix, start)]
        refs, size = list[port.ExtentRef](), prefix.namespace.block_size
        while start < prefix.num_blocks * size:
            answers = (tier.look_up(prefix, start) for tier in self.tiers)
            part = next(filter(None, answers), [])  # of the fastest tier that has any
            num_blocks = sum(ref.num_blocks for ref in part)
            if not num_blocks:
                break
            refs += part
            start += num_blocks * size
        return refs

    def load(
        self, ref: port.ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> port.LoadResult:
        """Load from the tier that found it."""
        tier = self._by_name.get(ref.tier)
        if tier is None:
            return port.LoadResult(0, port.LoadFault.MISSING)
        return tier.load(ref, into, num_blocks, deadline)

    def store(self, extents: Sequence[tuple[port.Extent, port.Buffer]]) -> list[port.StoreResult]:
        """Store to every tier; the result is ``stored`` where any of them did."""
        by_tier = [tier.store(extents) for tier in self.tiers]
        return [min(results, key=_RANK.index) for results in zip(*by_tier, strict=True)]

    def lease(self, prefix: port.Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Lease in every tier; returns the most tokens of any."""
        return max(tier.lease(prefix, keep_until, refresh_s) for tier in self.tiers)

    def use(self, prefix: port.Prefix, reuse: ReuseClass) -> None:
        """Record a use in every tier."""
        for tier in self.tiers:
            tier.use(prefix, reuse)

    def erase(self, salt: bytes) -> list[port.TierReceipt]:
        """Erase from every tier."""
        return list(chain.from_iterable(tier.erase(salt) for tier in self.tiers))

    def stats(self) -> list[port.TierStats]:
        """State and counts of every tier."""
        return list(chain.from_iterable(tier.stats() for tier in self.tiers))

    def close(self) -> None:
        """Close every tier."""
        for tier in self.tiers:
            tier.close()


_RANK = list(port.StoreResult)

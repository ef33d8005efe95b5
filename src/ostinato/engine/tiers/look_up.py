"""Finds the longest prefix that tiers have for every group of layers."""

from dataclasses import dataclass, field, replace

from ostinato.engine.tiers.groups import TierGroup, TierGroups
from ostinato.tiers.port import ExtentRef, KVTier, Prefix


@dataclass(slots=True, eq=False)
class TierHit:
    """What tiers have of a prefix."""

    end: int  # the longest hit, in tokens; what the pool has if tiers continue nothing
    refs: dict[str, list[ExtentRef]] = field(default_factory=dict)
    """What a hit at ``end`` reads, by name of its group, in token order; none overlap."""
    num_bytes: int = 0  # of it, at most

    @property
    def tier(self) -> str:
        """Name of the tier that has its beginning."""
        return next(refs[0].tier for refs in self.refs.values() if refs)


@dataclass(slots=True, eq=False)
class LookUp:
    """A look-up in flight."""

    prefixes: tuple[Prefix, ...]  # what is looked up, for each group
    num_tokens: int  # in whole blocks of the pool
    first_token: int  # the first token that the pool does not have
    hit: TierHit | None = None  # the result; None until it is known
    is_cancelled: bool = False  # whether its request has ended


def find(tier: KVTier, groups: TierGroups, look_up: LookUp) -> TierHit:
    """Find the longest hit that every group can continue; may block."""
    known, end = look_up.first_token, look_up.num_tokens
    refs: dict[str, list[ExtentRef]] = {}
    for group, prefix in zip(groups.groups, look_up.prefixes, strict=True):
        refs[group.name] = _look_up(tier, group, prefix, known, end)
        if group.is_full:
            end = known + sum(ref.num_blocks for ref in refs[group.name]) * group.unit
        if not refs[group.name]:
            return TierHit(known)
    stored = {
        group.name: {
            block
            for ref in refs[group.name]
            for block in range(ref.start // group.unit, ref.start // group.unit + ref.num_blocks)
        }
        for group in groups.sparse
    }
    before = -1
    while end != before:
        before = end
        for group in groups.sparse:
            end = group.longest_hit(end, known, stored[group.name])
    if end <= known:
        return TierHit(known)
    read = {g.name: _needed(g, refs[g.name], known, end) for g in groups.groups}
    num_bytes = sum(
        len(group.needed(end, known)) * group.copies.block_bytes for group in groups.groups
    )
    return TierHit(end, read, num_bytes)


def _look_up(
    tier: KVTier, group: TierGroup, prefix: Prefix, known: int, end: int
) -> list[ExtentRef]:
    """Look a group's blocks up between two positions."""
    end -= end % group.unit
    if end < len(prefix.tokens):
        prefix = replace(prefix, tokens=prefix.tokens[:end])
    start = known - known % group.unit
    return tier.look_up(prefix, start) if end > start else []


def _needed(group: TierGroup, refs: list[ExtentRef], known: int, end: int) -> list[ExtentRef]:
    """Return the references that a hit reads; of several tiers' the first for each block."""
    needed, chosen, covered = group.needed(end, known), list[ExtentRef](), set[int]()
    for ref in refs:
        first = ref.start // group.unit
        part = range(max(needed.start, first), min(needed.stop, first + ref.num_blocks))
        if not covered.issuperset(part):
            covered.update(part)
            chosen.append(ref)
    return sorted(chosen, key=lambda ref: ref.start)

"""The result of a load from a tier, and the speed of loads."""

import time
from dataclasses import dataclass, replace

from ostinato.tiers.port import ExtentRef, LoadFault

NEWEST_SHARE = 0.3
"""Weight of the newest measurement in a moving average."""


class Rate:
    """A speed, as a moving average."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None before the first measurement

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        measured = amount / max(seconds, 1e-9)
        known = measured if self.per_s is None else self.per_s
        self.per_s = known + NEWEST_SHARE * (measured - known)

    def seconds_for(self, amount: float) -> float | None:
        """Return how long an amount would take; None if unknown."""
        return None if self.per_s is None else amount / self.per_s


@dataclass(frozen=True, slots=True)
class LoadNote:
    """What a tier had of a prompt, and how much of it was loaded."""

    tier: str  # its name; of several, the first
    start: int  # position of the first token that the pool did not have
    tier_end: int  # position after the last token that the tier had
    loaded: tuple[tuple[str, int, int], ...] = ()  # from where, and which positions, in token order
    leased: int = 0  # position after the last loaded token under a lease; 0 without one
    keep_until: float = 0.0  # wall-clock end of that lease
    refresh_s: float = 0.0  # how long each use keeps it from then on; 0 if uses do not move its end
    fault: LoadFault | None = None  # why the load ended early; None if it did not
    is_cheaper_to_compute: bool = False  # whether nothing was loaded because computing is faster

    @property
    def end(self) -> int:
        """Position after the last token that was loaded; ``start`` if none was."""
        return self.loaded[-1][2] if self.loaded else self.start

    def with_part(self, ref: ExtentRef, num_tokens: int, fault: LoadFault | None) -> "LoadNote":
        """Return a note with the next loaded tokens, and why they were not all."""
        end = self.end + num_tokens
        parts, note = list(self.loaded), self
        if num_tokens:
            continues = bool(parts) and parts[-1][0] == ref.tier
            parts.append((ref.tier, parts.pop()[1] if continues else self.end, end))
            if ref.keep_until > time.time():
                kept, refresh = ref.keep_until, ref.refresh_s
                note = replace(self, leased=end, keep_until=kept, refresh_s=refresh)
        return replace(note, loaded=tuple(parts), fault=fault)

    def between(self, start: int, stop: int) -> "LoadNote | None":
        """Return what was loaded between two positions; None if nothing was."""
        cut = [(tier, max(a, start), min(b, stop)) for tier, a, b in self.loaded]
        parts = tuple(part for part in cut if part[1] < part[2])
        return LoadNote(self.tier, start, parts[-1][2], parts) if parts else None

    def loaded_before(self, end: int) -> dict[str, int]:
        """Count the tokens that were loaded and come before a position, by tier."""
        counts: dict[str, int] = {}
        for tier, start, stop in self.loaded:
            if min(stop, end) > start:
                counts[tier] = counts.get(tier, 0) + min(stop, end) - start
        return counts

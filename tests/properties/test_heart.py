"""Thousands of events in a heart with everything switched on; ``test_nightly`` goes further."""

from tests.properties.heart_walk import walk

THINGS = {
    *("arrived", "steps", "answers", "failed", "cancelled", "stopped", "preempted"),
    *("admitted", "shared", "copied", "forked", "sibling without room"),
    *("left the window", "hit through a window", "floor held"),
    *("lease accepted", "lease clipped", "lease rejected", "lease ended", "lease expired"),
    *("lease refreshed", "epochs", "ran on under old weights", "wrote nothing"),
    *("erased", "erasure refused", "resets"),
    *("publication accepted", "publication rejected", "unpublished", "behind a public prefix"),
}
"""What a walk meets."""


def test_a_random_walk_through_everything_at_once_breaks_nothing():
    """12,000 events; a walk that stopped meeting something would test less than it says."""
    met = sum((walk(seed, num_events=3_000) for seed in range(4)), start=walk(99, num_events=150))
    assert min(met[thing] for thing in THINGS) >= 5, met

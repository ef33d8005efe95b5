"""Keys of extents on a server, and how those of a tenant are listed without reading others'.

::

    ostinato/1/kv/TENANT/NAMESPACE/DIGEST         an extent
    ostinato/1/of/NAME/TENANT/NAMESPACE/DIGEST    a mark: an erasure of NAME includes the extent

An extent is marked under its tenant without the client's salt and under its public prefix, if it
has them. Marks are stored before it, and expire with it.
"""

from collections.abc import Iterator

from ostinato.tiers.byte_store import ByteStore
from ostinato.tiers.record import FIXED_BYTES, NO_NAME, Names, names_and_size
from ostinato.tiers.remote.search import LONGEST_WINDOW

RECORDS, MARKS = "ostinato/1/kv/", "ostinato/1/of/"


def with_marks(place: str, names: Names) -> list[str]:
    """Return the key of an extent and those of its marks."""
    tenant, *others = names
    rest = place.removeprefix(RECORDS)
    marked = sorted({*others} - {tenant, NO_NAME})
    return [place, *(f"{MARKS}{name.hex()}/{rest}" for name in marked)]


def delete_all(store: ByteStore, name: bytes) -> tuple[int, int]:
    """Delete the extents of a tenant's name and their marks; returns how many, and their bytes."""
    marks = list(store.keys(f"{MARKS}{name.hex()}/"))
    places = [RECORDS + mark.removeprefix(f"{MARKS}{name.hex()}/") for mark in marks]
    num_extents = num_bytes = 0
    for place, names, size in _extents(store, [*store.keys(f"{RECORDS}{name.hex()}/"), *places]):
        if name in names:
            store.delete(with_marks(place, names))
            num_extents, num_bytes = num_extents + 1, num_bytes + size
    store.delete(marks)
    return num_extents, num_bytes


def _extents(store: ByteStore, places: list[str]) -> Iterator[tuple[str, Names, int]]:
    """Yield keys of extents, with their names and sizes."""
    for first in range(0, len(places), LONGEST_WINDOW):
        batch = places[first : first + LONGEST_WINDOW]
        for place, start in zip(batch, store.starts(batch, FIXED_BYTES), strict=True):
            yield place, *names_and_size(start)

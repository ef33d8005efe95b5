"""Converts the keys of sequences to the prefixes of tiers, and lists all that are cached."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.engine.tiers.groups import TierGroup, TierGroups
from ostinato.tiers.port import Namespace, Prefix

NamespaceOf = Callable[[Identity, TierGroup], Namespace]
"""Returns all that the bytes of a group's blocks depend on, besides tenant and tokens."""


def prefix_of(
    key: PrefixKey, num_tokens: int, group: TierGroup, namespace_of: NamespaceOf
) -> Prefix:
    """Return a sequence's first tokens as a tier's prefix in the namespace of a group."""
    identity, namespace = key.identity, namespace_of(key.identity, group)
    tokens = key.tokens[:num_tokens]
    if key.images:
        _replace_images(tokens, key, namespace.block_size)
    public = identity.root.tenant if identity.num_public_tokens else b""
    return Prefix(namespace, identity.tenant, tokens, public, key)


def _replace_images(tokens: "array[int]", key: PrefixKey, size: int) -> None:
    """Put a digest in place of each block that shows part of an image.

    Tiers compare tokens, and placeholders are the same for every image: such a block is named by
    SHAKE-256 over its tokens and its images' content and place, as long as its tokens are.
    """
    shown = PrefixKey(Identity(), key.tokens, key.images)  # without what the identity adds
    for start in range(0, len(tokens) - size + 1, size):
        block = shown.block_key(start, start + size)
        if block.spans:
            digest = hashlib.shake_256(block.name).digest(size * TOKEN_BYTES)
            tokens[start : start + size] = array("I", digest)


def first_tokens(key: PrefixKey, num_tokens: int) -> PrefixKey:
    """Return the key of a sequence's first tokens, up to the end of an image that they cut."""
    images = [image for image in key.images if image.start < num_tokens]
    end = max([num_tokens, *(image.end for image in images)])
    return PrefixKey(key.identity, key.tokens[:end], images)


def cached_paths(
    manager: CacheManager, has_images: bool, groups: TierGroups, max_bytes: float
) -> list[PrefixKey]:
    """List the whole blocks of cached paths, the most used and the last used first.

    Args:
        manager: Of the cache.
        has_images: Whether a sequence may show any: looking for them takes a while.
        groups: Of the model.
        max_bytes: Where to stop; what paths share counts once, and each end needs its windows. The
            last path is cut there.
    """
    size, width = manager.block_size, manager.block_size * TOKEN_BYTES
    paths: list[tuple[array[int], tuple[ImageSpan, ...]]] = []
    lengths: list[tuple[int, int | None]] = []  # own tokens, and the run before
    leaves: dict[int, tuple[bool, int, Identity]] = {}
    for place, run in enumerate(manager.index.runs()):
        entry = run.entries[0]
        own = entry.run_from(0)[1]
        own = own[: len(own) // width * width]  # without a partial block
        before, images = (array("I"), ()) if run.parent is None else paths[run.parent]
        for block in range(len(own) // width if has_images else 0):
            shown = entry.block_key(block, size).spans
            images += tuple(x for x in shown if isinstance(x, ImageSpan) and x not in images)
        paths.append((before + array("I", own), images))
        lengths.append((len(own) // TOKEN_BYTES, run.parent))
        if own:
            leaves.pop(-1 if run.parent is None else run.parent, None)
            leaves[place] = entry.uses > 1, entry.idle_tick, entry.identity
    ranked = sorted(leaves, key=lambda place: leaves[place][:2], reverse=True)
    return [
        _whole_images(leaves[place][2], paths[place][0][:num_tokens], paths[place][1])
        for place, num_tokens in _cut(ranked, lengths, groups, max_bytes)
    ]


def _cut(
    ranked: Iterable[int],
    lengths: Sequence[tuple[int, int | None]],
    groups: TierGroups,
    room: float,
) -> Iterator[tuple[int, int]]:
    """Yield the paths that fit a number of bytes, by their last run, and how much of each."""
    counted = set[int]()
    for place in ranked:
        total = num_new = 0
        run: int | None = place
        while run is not None:
            own, before = lengths[run]
            total += own
            num_new += 0 if run in counted else own
            counted.add(run)
            run = before
        needed = num_new * groups.bytes_per_token + groups.window_bytes(total)
        if needed > room:
            if longest := groups.longest_prefix(int(room), total - num_new):
                yield place, min(total, int(longest))
            return
        yield place, total
        room -= needed


def _whole_images(
    identity: Identity, tokens: "array[int]", images: Iterable[ImageSpan]
) -> PrefixKey:
    """Return the key of a cached path, without an image that is cached in part."""
    cut = [image.start for image in images if image.end > len(tokens)]
    tokens = tokens[: min([len(tokens), *cut])]
    return PrefixKey(identity, tokens, [image for image in images if image.end <= len(tokens)])

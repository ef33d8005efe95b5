"""What is known of a prompt: how much of it each worker has, or was sent lately."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.identity import Identity, PrefixKey, salt_name
from ostinato.router.decision import RouteRequest
from ostinato.router.load import Assigned
from ostinato.router.prefix_tree import Namespace, Node, PrefixTree, block_names

TIER_WORTH = (0.0, 0.2, 0.6)
"""Of computing a token, the share that loading it takes: from the device, the host, or slower."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a worker has of a prompt.

    Attributes:
        cached_tokens: By its events.
        expected_tokens: Behind those: sent there lately, without an event so far.
        load_tokens: What loading from slower tiers takes, as tokens to compute.
        sent_by: Number of the decision that sent the deepest expected block.
    """

    cached_tokens: int
    expected_tokens: int
    load_tokens: int
    sent_by: int | None


def look_up(
    tree: PrefixTree, request: RouteRequest, workers: Sequence[tuple[int, int]], now: float
) -> list[Found]:
    """Return what workers, given as bit and block size, have of a prompt."""
    paths: dict[int, list[Node]] = {}
    for size in {size for _, size in workers}:
        root = tree.find_root(_namespace(request, size))
        paths[size] = [] if root is None else tree.walk(root, _names(request, size))
    return [_found(paths[size], bit, size, now) for bit, size in workers]


def _found(path: Iterable[Node], bit: int, size: int, now: float) -> Found:
    """Follow a prompt's blocks as far as a worker has, or was sent, all of them."""
    cached = expected = 0
    worth, sent_by = 0.0, None
    for node in path:
        tier = _tier(node, bit)
        if tier is None:
            until, number = node.sent.get(bit, (now, 0)) if node.sent else (now, 0)
            if until <= now:
                break
            sent_by = number
        else:
            worth += size * TIER_WORTH[tier]
        if sent_by is None:
            cached += size
        else:
            expected += size
    return Found(cached, expected, round(worth), sent_by)


def _tier(node: Node, bit: int) -> int | None:
    """Return the fastest tier in which a worker has a block; None if it is in none."""
    for tier, workers in enumerate(node.held):
        if workers >> bit & 1:
            return tier
    return None


def expect(
    tree: PrefixTree, request: RouteRequest, size: int, work: Assigned, ttl_s: float
) -> None:
    """Take a prompt's blocks to be cached where it was sent, until events or time tell."""
    node, now = tree.root(_namespace(request, size)), work.at
    for name in _names(request, size):
        node = tree.child(node, name)
        if tree.expect(node, work.worker, now, now + ttl_s, work.number):
            work.nodes.append(node)
    tree.shrink()


def _namespace(request: RouteRequest, block_size: int) -> Namespace:
    salt = salt_name(request.salt.encode()) if request.salt else ""
    return Namespace(request.adapter, salt, request.characters, block_size)


def _names(request: RouteRequest, block_size: int) -> list[bytes]:
    if not request.images:
        return block_names(request.tokens, block_size)
    key = PrefixKey(Identity(), request.tokens, request.images)

    def extra(start: int, stop: int) -> bytes:
        found = key.extra(start, stop)
        return b"" if found is None else found.encoded

    return block_names(request.tokens, block_size, extra)

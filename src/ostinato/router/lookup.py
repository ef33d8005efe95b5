"""What is known of a prompt: how much of it each worker has, or was sent lately."""

from collections.abc import Sequence
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
    found: dict[int, Found] = {}
    for size in {size for _, size in workers}:
        root = tree.find_root(_namespace(request, size))
        path = [] if root is None else tree.walk(root, _names(request, size))
        found |= _found(path, [bit for bit, its in workers if its == size], size, now)
    return [found[bit] for bit, _ in workers]


def _found(path: Sequence[Node], bits: Sequence[int], size: int, now: float) -> dict[int, Found]:
    """Follow a prompt's blocks as far as each worker has, or was sent, all of them.

    Cost: one step per block, and one more for each worker that does not have it in its device.
    """
    end = dict.fromkeys(bits, len(path))
    first_sent: dict[int, int] = {}
    sent_by: dict[int, int] = {}
    worth = dict.fromkeys(bits, 0.0)
    following = sum(1 << bit for bit in bits)
    for depth, node in enumerate(path):
        away = following & ~node.held[0]
        while away:
            bit = away.bit_length() - 1
            away ^= 1 << bit
            if node.held[1] >> bit & 1:
                worth[bit] += size * TIER_WORTH[1]
            elif node.held[2] >> bit & 1:
                worth[bit] += size * TIER_WORTH[2]
            elif node.sent and node.sent.get(bit, (now, 0))[0] > now:
                first_sent.setdefault(bit, depth)
                sent_by[bit] = node.sent[bit][1]
            else:
                end[bit] = depth
                following ^= 1 << bit
        if not following:
            break
    cached = {bit: first_sent.get(bit, end[bit]) for bit in bits}
    return {
        bit: Found(
            cached[bit] * size,
            (end[bit] - cached[bit]) * size,
            round(worth[bit]),
            sent_by.get(bit),
        )
        for bit in bits
    }


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

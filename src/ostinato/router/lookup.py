"""What is known of a prompt: how much of it each worker has, or was sent lately."""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.identity import Identity, PrefixKey
from ostinato.observe.events import salt_name
from ostinato.router.decision import RouteRequest
from ostinato.router.load import Assigned
from ostinato.router.prefix_tree import Namespace, Node, PrefixTree, block_names

TIER_WORTH = (0.0, 0.2, 0.6)
"""Of computing a token, the share that loading it takes: from the device, the host, or slower."""


@dataclass(frozen=True, slots=True)
class Walked:
    """A prompt's blocks in the tree, for one block size.

    Attributes:
        names: Of all of them.
        path: Nodes, as far as there are any.
    """

    names: Sequence[bytes]
    path: Sequence[Node]


@dataclass(slots=True)
class Found:
    """What a worker has of a prompt.

    Attributes:
        walked: The prompt's blocks, of its size.
        cached_tokens: By its events.
        expected_tokens: Behind those: sent there lately, without an event so far.
        load_tokens: What loading from slower tiers takes, as tokens to compute.
        sent_by: Number of the decision that sent the deepest expected block.
    """

    walked: Walked
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
        root, names = tree.find_root(_namespace(request, size)), _names(request, size)
        walked = Walked(names, [] if root is None else tree.walk(root, names))
        found |= _found(walked, [bit for bit, its in workers if its == size], size, now)
    return [found[bit] for bit, _ in workers]


def _found(walked: Walked, bits: Sequence[int], size: int, now: float) -> dict[int, Found]:
    """Follow a prompt's blocks as far as each worker has, or was sent, all of them.

    Cost: one step per block, and one more for each worker that does not have it in its device.
    """
    path = walked.path
    end = dict.fromkeys(bits, len(path))
    first_sent: dict[int, int] = {}
    sent_by: dict[int, int] = {}
    worth = dict.fromkeys(bits, 0.0)
    following = sum(1 << bit for bit in bits)
    nowhere = (now, 0)
    for depth, node in enumerate(path):
        away = following & ~node.held[0]
        sent = node.sent
        while away:
            bit = away.bit_length() - 1
            away ^= 1 << bit
            if node.held[1] >> bit & 1:
                worth[bit] += size * TIER_WORTH[1]
            elif node.held[2] >> bit & 1:
                worth[bit] += size * TIER_WORTH[2]
            elif sent and (mark := sent.get(bit, nowhere))[0] > now:
                if bit not in first_sent:
                    first_sent[bit] = depth
                sent_by[bit] = mark[1]
            else:
                end[bit] = depth
                following ^= 1 << bit
        if not following:
            break
    cached = {bit: first_sent.get(bit, end[bit]) for bit in bits}
    return {
        bit: Found(
            walked,
            cached[bit] * size,
            (end[bit] - cached[bit]) * size,
            round(worth[bit]),
            sent_by.get(bit),
        )
        for bit in bits
    }


def expect(
    tree: PrefixTree, request: RouteRequest, size: int, found: Found, work: Assigned, ttl_s: float
) -> None:
    """Take a prompt's blocks to be cached where it was sent, until events or time tell.

    Cost: one step per block that its worker's events do not tell of.
    """
    walked, now = found.walked, work.at
    first = found.cached_tokens // size  # before it, the worker has all
    known = walked.path[first:]
    node = walked.path[-1] if walked.path else tree.root(_namespace(request, size))
    tree.expect(known, work.worker, now, now + ttl_s, work.number, work.nodes)
    rest = []
    for name in walked.names[len(walked.path) :]:
        node = tree.child(node, name)
        rest.append(node)
    tree.expect(rest, work.worker, now, now + ttl_s, work.number, work.nodes)
    tree.shrink()


def _namespace(request: RouteRequest, block_size: int) -> Namespace:
    salt = salt_name(request.salt.encode()) if request.salt else ""
    return Namespace(request.adapter, salt, request.characters, block_size)


def _names(request: RouteRequest, block_size: int) -> list[bytes]:
    if not request.images:
        return block_names(request.tokens, block_size)
    key = PrefixKey(Identity(), request.tokens, request.images)
    return block_names(request.tokens, block_size, key.extra)

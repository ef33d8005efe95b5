"""Looks up how much of a prompt each worker has, or was sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.identity import Identity, PrefixKey
from ostinato.observe.events import salt_name
from ostinato.router.decision import RouteRequest
from ostinato.router.load import Assigned
from ostinato.router.prefix_tree import Namespace, Node, PrefixTree, block_names

LOAD_COST = (0.0, 0.2, 0.6)
"""Cost of loading a token relative to computing it: from the device, the host, or slower."""


@dataclass(slots=True)
class Found:
    """What a worker has of a prompt.

    Attributes:
        block_size: Tokens of a block, as the worker's prompts are compared.
        names: Names of the prompt's blocks.
        path: Existing nodes of the first ones.
        cached_tokens: Tokens cached by its events.
        expected_tokens: Tokens after those that were sent there, without an event so far.
        load_tokens: Cost of loading from slower tiers, as tokens to compute.
        sent_by: Decision that sent the deepest expected block.
    """

    block_size: int
    names: Sequence[bytes]
    path: Sequence[Node]
    cached_tokens: int
    expected_tokens: int
    load_tokens: int
    sent_by: int | None


def look_up(
    tree: PrefixTree, request: RouteRequest, workers: Sequence[tuple[int, int]], now: float
) -> list[Found]:
    """Return what each worker, given as bit and block size, has of a prompt."""
    found: dict[int, Found] = {}
    for size in {size for _, size in workers}:
        root, names = tree.find_root(_namespace(request, size)), _names(request, size)
        path = [] if root is None else tree.walk(root, names)
        bits = [bit for bit, its in workers if its == size]
        found |= _found(names, path, bits, size, now)
    return [found[bit] for bit, _ in workers]


def _found(
    names: Sequence[bytes], path: Sequence[Node], bits: Sequence[int], size: int, now: float
) -> dict[int, Found]:
    """Follow a prompt's blocks as far as each worker has, or was sent, all of them.

    Cost: one step per block, and one more for each worker without it on its device.
    """
    end = dict.fromkeys(bits, len(path))
    first_sent: dict[int, int] = {}
    sent_by: dict[int, int] = {}
    loading = dict.fromkeys(bits, 0.0)
    following = sum(1 << bit for bit in bits)
    nowhere = (now, 0)
    for depth, node in enumerate(path):
        away = following & ~node.held[0]
        sent = node.sent
        while away:
            bit = away.bit_length() - 1
            away ^= 1 << bit
            if node.held[1] >> bit & 1:
                loading[bit] += size * LOAD_COST[1]
            elif node.held[2] >> bit & 1:
                loading[bit] += size * LOAD_COST[2]
            elif sent and (mark := sent.get(bit, nowhere))[0] > now:
                if bit not in first_sent:
                    first_sent[bit] = depth
                sent_by[bit] = mark[1]
            else:
                end[bit] = depth
                following ^= 1 << bit
        if not following:
            break
    found = dict[int, Found]()
    for bit in bits:
        cached = first_sent.get(bit, end[bit])
        counts = cached * size, (end[bit] - cached) * size, round(loading[bit])
        found[bit] = Found(size, names, path, *counts, sent_by.get(bit))
    return found


def expect(
    tree: PrefixTree, request: RouteRequest, found: Found, work: Assigned, ttl_s: float
) -> None:
    """Expect a prompt's blocks at its worker, until events come or ``ttl_s`` has passed.

    Cost: one step per block that is not cached by the worker's events.
    """
    first = found.cached_tokens // found.block_size  # the worker has all blocks before it
    nodes = list(found.path[first:])
    node = found.path[-1] if found.path else tree.root(_namespace(request, found.block_size))
    for name in found.names[len(found.path) :]:
        node = tree.child(node, name)
        nodes.append(node)
    work.nodes += tree.expect(nodes, work.worker, work.number, work.at, work.at + ttl_s)
    tree.shrink()


def _namespace(request: RouteRequest, block_size: int) -> Namespace:
    salt = salt_name(request.salt.encode()) if request.salt else ""
    return Namespace(request.adapter, salt, request.characters, block_size)


def _names(request: RouteRequest, block_size: int) -> list[bytes]:
    if not request.images:
        return block_names(request.tokens, block_size)
    key = PrefixKey(Identity(), request.tokens, request.images)
    return block_names(request.tokens, block_size, lambda *block: key.block_key(*block).extra)

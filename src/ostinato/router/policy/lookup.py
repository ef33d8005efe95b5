"""Looks up how much of a prompt each worker has, or was sent."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ostinato.core.identity import Identity, PrefixKey
from ostinato.observe.events import salt_name
from ostinato.router.policy.decision import RouteRequest
from ostinato.router.policy.load import Assigned
from ostinato.router.policy.prefix_tree import Node, PrefixTree, SharingKey, block_names

LOAD_COST = (0.0, 0.2, 0.6)
"""Cost of loading a token relative to computing it: from the device, the host, or slower."""

SLICE_BLOCKS = 256
"""Blocks that are handled at once: the work for a long prompt is a generator, so that an event loop
can do other work in between. Other requests and events may change the tree meanwhile."""

ValueT = TypeVar("ValueT")

Steps = Generator[None, None, ValueT]


@dataclass(slots=True)
class WorkerPrefix:
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


def exhaust(steps: Steps[ValueT]) -> ValueT:
    """Run all slices of some work at once; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: ValueT = end.value
            return value


def look_up(
    tree: PrefixTree, request: RouteRequest, workers: Sequence[tuple[int, int]], now: float
) -> Steps[list[WorkerPrefix]]:
    """Return what each worker, given as bit and block size, has of a prompt."""
    lookups: dict[int, WorkerPrefix] = {}
    for size in {size for _, size in workers}:
        names = yield from _names(request, size)
        path = yield from _walk(tree, tree.find_root(_namespace(request, size)), names)
        bits = [bit for bit, its in workers if its == size]
        lookups |= yield from _cover(names, path, bits, size, now)
    return [lookups[bit] for bit, _ in workers]


def _walk(tree: PrefixTree, root: Node | None, names: Sequence[bytes]) -> Steps[list[Node]]:
    path: list[Node] = []
    if root is None:
        return path
    for start in range(0, len(names), SLICE_BLOCKS):
        if start:
            yield
        part = tree.walk(path[-1] if path else root, names[start : start + SLICE_BLOCKS])
        path += part
        if len(part) < SLICE_BLOCKS:
            break
    return path


def _num_live(path: Sequence[Node]) -> int:
    """Return the length of a path up to a node that was removed between two slices."""
    if len(path) <= SLICE_BLOCKS:
        return len(path)
    return next((depth for depth, node in enumerate(path) if not node.is_live), len(path))


def _cover(
    names: Sequence[bytes], path: Sequence[Node], bits: Sequence[int], size: int, now: float
) -> Steps[dict[int, WorkerPrefix]]:
    """Follow a prompt's blocks as far as each worker has, or was sent, all of them.

    Cost: one step per block, and one more for each worker without it on its device.
    """
    end = dict.fromkeys(bits, len(path))  # number of blocks that a worker has or was sent
    first_sent: dict[int, int] = {}  # of those, the first that was only sent
    sent_by: dict[int, int] = {}  # decision that sent the deepest of those
    loading = dict.fromkeys(bits, 0.0)  # from slower tiers, as tokens to compute
    following = sum(1 << bit for bit in bits)
    nowhere = (now, 0)
    for start in range(0, len(path), SLICE_BLOCKS):
        if start:
            yield
        for depth, node in enumerate(path[start : start + SLICE_BLOCKS], start):
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
        if not following:
            break
    num_live, prefixes = _num_live(path), dict[int, WorkerPrefix]()
    for bit in bits:
        reached = min(end[bit], num_live)
        cached = min(first_sent.get(bit, reached), reached)
        prefixes[bit] = WorkerPrefix(
            size, names, path[:num_live], cached * size, (reached - cached) * size,
            round(loading[bit]), sent_by.get(bit),
        )  # fmt: skip
    return prefixes


def expect(
    tree: PrefixTree, request: RouteRequest, lookup: WorkerPrefix, work: Assigned, ttl_s: float
) -> Steps[None]:
    """Expect a prompt's blocks at its worker, until events come or ``ttl_s`` has passed.

    Cost: one step per block that is not cached by the worker's events.
    """
    until = work.at + ttl_s
    first = lookup.cached_tokens // lookup.block_size  # the worker has all blocks before it
    for start in range(first, len(lookup.path), SLICE_BLOCKS):
        if start > first:
            yield
        part = lookup.path[start : start + SLICE_BLOCKS]
        work.nodes += tree.expect(part, work.worker, work.number, work.at, until)
    node = lookup.path[-1] if lookup.path else tree.root(_namespace(request, lookup.block_size))
    for start in range(len(lookup.path), len(lookup.names), SLICE_BLOCKS):
        if not node.is_live:  # removed between two slices
            break
        nodes = tree.chain(node, lookup.names[start : start + SLICE_BLOCKS])
        node = nodes[-1]
        work.nodes += tree.expect(nodes, work.worker, work.number, work.at, until)
        tree.shrink()
        if start + SLICE_BLOCKS < len(lookup.names):
            yield
    tree.shrink()


def _namespace(request: RouteRequest, block_size: int) -> SharingKey:
    salt = salt_name(request.salt.encode()) if request.salt else ""
    return SharingKey(request.adapter, salt, request.characters, block_size)


def _names(request: RouteRequest, block_size: int) -> Steps[Sequence[bytes]]:
    if request.images:
        key = PrefixKey(Identity(), request.tokens, request.images)
        return block_names(request.tokens, block_size, lambda *block: key.block_key(*block).extra)
    names, step = list[bytes](), SLICE_BLOCKS * block_size
    for start in range(0, len(request.tokens), step):
        if start:
            yield
        names += block_names(request.tokens[start : start + step], block_size)
    return names

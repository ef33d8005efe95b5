"""A tree of prefixes by tokens, and the workers that have them.

A node is one block; its name is its packed tokens and the digests of its images::

    top ─► root of ("", "", 16) ─► "ABCD" ─► "EFGH"     held: worker 0
                                          └► "XYZW"     held: worker 1; sent to: worker 2
        ─► root of (adapter, salt, 16) ─► ...

Workers are bits of a mask: blocks are *held* by tier, by their events, and *sent* to them by this
router, as long as no event has come. A walk compares whole blocks, so that hashes cannot collide,
and costs one look-up per block.

The number of tokens is bounded: the least recently used leaf is evicted first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

NUM_TIERS = 3
"""Device memory, the host's memory, and everything slower."""


@dataclass(frozen=True, slots=True)
class SharingKey:
    """What two prefixes must have in common to share blocks.

    Attributes:
        adapter: Name.
        salt: ``salt_name`` of the tenant.
        characters: Whether tokens are code points.
        block_size: Tokens per block.
    """

    adapter: str
    salt: str
    characters: bool
    block_size: int


class Node:
    """One block after its parent.

    Attributes:
        parent: None for a root, and for a removed node.
        name: Name of the block among its siblings.
        held: Per tier, the workers that have it, as bits.
        sent: By worker, until when it is expected there, and by which decision.
        num_children: Number of children.
        used: Tick of its last walk.
        is_live: Whether it is part of the tree.
    """

    __slots__ = ("held", "is_live", "name", "num_children", "parent", "sent", "used")

    def __init__(self, parent: "Node | None", name: object, used: int) -> None:
        self.parent = parent
        self.name = name
        self.held = [0] * NUM_TIERS
        self.sent: dict[int, tuple[float, int]] | None = None
        self.num_children = 0
        self.used = used
        self.is_live = True

    @property
    def holders(self) -> int:
        """Workers that have it in any tier, as bits."""
        held = self.held
        return held[0] | held[1] | held[2]


class PrefixTree:
    """The tracked prefixes of all workers."""

    def __init__(self, max_tokens: int, on_evict: Callable[[int], None]) -> None:
        """Start empty.

        Args:
            max_tokens: Maximum tokens of all nodes.
            on_evict: Called with the holders, as bits, of a block evicted for space.
        """
        self._max_tokens = max_tokens
        self._on_evict = on_evict
        self._nodes: dict[tuple[int, object], Node] = {}  # by parent and name
        self._leaves: OrderedDict[int, Node] = OrderedDict()  # least recently used first
        self._top = Node(None, None, 0)
        self._tick = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    def root(self, namespace: SharingKey) -> Node:
        """Return the root of a namespace; creates it if there is none."""
        return self.child(self._top, namespace)

    def find_root(self, namespace: SharingKey) -> Node | None:
        """Return the root of a namespace; None if there is none."""
        return self._nodes.get((id(self._top), namespace))

    def child(self, parent: Node, name: object) -> Node:
        """Return a child by name; creates it if there is none."""
        node = self._nodes.get((id(parent), name))
        return self.chain(parent, (name,))[0] if node is None else node

    def chain(self, parent: Node, names: Iterable[object]) -> list[Node]:
        """Return one node below the other by their names; creates those that are missing."""
        self._tick += 1
        tick, nodes, path, has_grown = self._tick, self._nodes, list[Node](), False
        for name in names:
            key = id(parent), name
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = Node(parent, name, tick)
                if not has_grown:
                    self._leaves.pop(id(parent), None)
                    has_grown = True
                parent.num_children += 1
                self.num_tokens += _num_tokens(node)
            path.append(node)
            parent = node
        if has_grown:
            self._leaves[id(parent)] = parent
        return path

    def walk(self, root: Node, names: Iterable[object]) -> list[Node]:
        """Return the existing nodes of a prefix, and mark them as used."""
        self._tick += 1
        tick, nodes, node, path = self._tick, self._nodes, root, []
        for name in names:
            child = nodes.get((id(node), name))
            if child is None:
                break
            child.used = tick
            path.append(child)
            node = child
        if id(node) in self._leaves:
            self._leaves.move_to_end(id(node))
        return path

    def hold(self, node: Node, worker: int, tier: int) -> bool:
        """Add a holder of a block; returns whether the worker had it in no tier."""
        is_new = not node.holders >> worker & 1
        node.held[tier] |= 1 << worker
        if node.sent is not None:
            node.sent.pop(worker, None)
        return is_new

    def release(self, node: Node, worker: int, tier: int) -> bool:
        """Remove a holder of a block; returns whether the worker has it in no other tier."""
        had = node.holders >> worker & 1
        node.held[tier] &= ~(1 << worker)
        is_gone = bool(had) and not node.holders >> worker & 1
        self._prune(node)
        return is_gone

    def expect(
        self, nodes: Iterable[Node], worker: int, decision: int, now: float, until: float
    ) -> list[Node]:
        """Expect blocks at a worker that they were sent to, unless it has them.

        Returns:
            The nodes that no earlier decision expects there.
        """
        bit, mark, nowhere, first = 1 << worker, (until, decision), (now, decision), list[Node]()
        for node in nodes:
            held = node.held
            if (held[0] | held[1] | held[2]) & bit:
                continue
            if not node.sent:
                node.sent = {worker: mark}
                first.append(node)
                continue
            before, sent_by = node.sent.get(worker, nowhere)
            if before <= now:
                node.sent[worker] = mark
                first.append(node)
            else:
                node.sent[worker] = mark if sent_by == decision else (until, sent_by)
        return first

    def unexpect(self, node: Node, worker: int, decision: int) -> None:
        """Undo ``expect`` for one node of a decision."""
        sent = node.sent
        if sent is not None and sent.get(worker, (0.0, -1))[1] == decision:
            del sent[worker]
            self._prune(node)

    def clear(self, worker: int) -> None:
        """Remove a worker from all nodes."""
        keep = ~(1 << worker)
        for node in list(self._nodes.values()):
            held = node.held
            if node.is_live and (node.holders >> worker & 1 or node.sent):
                held[:] = [mask & keep for mask in held]
                if node.sent is not None:
                    node.sent.pop(worker, None)
                self._prune(node)

    def shrink(self) -> None:
        """Evict the least recently used leaves until the limit holds."""
        while self.num_tokens > self._max_tokens:
            node = next(iter(self._leaves.values()))
            holders = node.holders
            self._remove(node)
            node.held = [0] * NUM_TIERS
            if holders:
                self._on_evict(holders)

    def _prune(self, node: Node) -> None:
        """Remove a leaf that no worker has, and ancestors that become such leaves."""
        while node.is_live and not node.num_children and not node.holders and not node.sent:
            parent = node.parent
            self._remove(node)
            if parent is None or parent is self._top:
                return
            node = parent

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.num_children, "only leaves are removed"
        del self._nodes[id(parent), node.name]
        del self._leaves[id(node)]
        node.is_live, node.parent = False, None
        self.num_tokens -= _num_tokens(node)
        parent.num_children -= 1
        if not parent.num_children and parent is not self._top:
            self._leaves[id(parent)] = parent
            oldest = next(iter(self._leaves.values()))
            if parent.used <= oldest.used:
                self._leaves.move_to_end(id(parent), last=False)

    def check(self) -> None:
        """Assert that counts, leaves and links agree."""
        children: dict[int, int] = {}
        for (parent, name), node in self._nodes.items():
            assert node.is_live and node.name == name and id(node.parent) == parent
            children[parent] = children.get(parent, 0) + 1
        for node in self._nodes.values():
            assert node.num_children == children.get(id(node), 0)
            assert (id(node) in self._leaves) == (not node.num_children)
        assert len(self._leaves) == sum(not n.num_children for n in self._nodes.values())
        assert self.num_tokens == sum(map(_num_tokens, self._nodes.values())) <= self._max_tokens

    def items(self) -> Iterable[Node]:
        """All nodes."""
        return self._nodes.values()


def _num_tokens(node: Node) -> int:
    """Return the tokens of a node; a root counts as one."""
    return len(node.name) // 4 if isinstance(node.name, bytes) else 1


def block_names(
    tokens: Sequence[int], block_size: int, extras: Callable[[int, int], bytes] | None = None
) -> list[bytes]:
    """Return the names of a prompt's full blocks: packed tokens, and digests of images."""
    packed = array("I", tokens).tobytes()
    num_blocks, width = len(tokens) // block_size, block_size * 4
    names = [packed[i * width : (i + 1) * width] for i in range(num_blocks)]
    if extras is not None:
        for i in range(num_blocks):
            names[i] += extras(i * block_size, (i + 1) * block_size)
    return names

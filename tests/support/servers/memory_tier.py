"""A tier in a dictionary, with faults on demand: what the engine does with one, without a disk."""

import threading
import time
from collections.abc import Sequence
from itertools import takewhile

from ostinato.engine.tiers.groups import tier_groups
from ostinato.engine.tiers.open_tiers import OpenTiers
from ostinato.runner.model_runner import ModelRunner
from ostinato.tiers import port
from ostinato.tiers.retention import ReuseClass


class MemoryTier:
    """Blocks by the digest of all tokens up to their end.

    Attributes:
        blocks: Payloads.
        salts: Whose each is.
        namespaces: Of which group of layers each is, and more.
        keep_until: Leases.
        refresh_s: How long each use keeps what is leased.
        faults: Digests whose load ends with a fault.
        refusal: What stores are answered, if they are refused.
        gate: Loads wait for it.
        look_up_gate: Look-ups wait for it.
        limit_bytes: What its stats say of its size; 0 without a limit.
        num_looked_up: Look-ups so far.
        uses: What requests released, with their class.
    """

    name = "disk"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.salts: dict[bytes, tuple[bytes, ...]] = {}
        self.namespaces: dict[bytes, port.Namespace] = {}
        self.keep_until: dict[bytes, float] = {}
        self.refresh_s: dict[bytes, float] = {}
        self.faults: dict[bytes, port.LoadFault] = {}
        self.refusal: port.StoreResult | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.look_up_gate = threading.Event()
        self.look_up_gate.set()
        self.limit_bytes = self.num_looked_up = 0
        self.uses: list[tuple[port.Prefix, ReuseClass]] = []
        self.num_loads = 0
        self.listener = port.TierListener()

    def opened(self, config: object, runner: ModelRunner, listener: port.TierListener) -> OpenTiers:
        """Stand in for the tiers that settings name."""
        self.listener = listener
        return OpenTiers(self, tier_groups(runner), 2**28)

    def look_up(self, prefix: port.Prefix, start: int) -> list[port.ExtentRef]:
        self.num_looked_up += 1
        self.look_up_gate.wait(10)
        size, digests = prefix.namespace.block_size, prefix.digests
        refs, place = list[port.ExtentRef](), start // size
        while place < len(digests):
            part = list(takewhile(self.blocks.__contains__, digests[place : place + 2]))
            if part:
                refs.append(self._ref(prefix, place, part))
            elif not prefix.namespace.is_sparse:
                break
            place += max(1, len(part))
        return refs

    def _ref(self, prefix: port.Prefix, place: int, part: list[bytes]) -> port.ExtentRef:
        """Return a reference to consecutive blocks."""
        return port.ExtentRef(
            "disk",
            place * prefix.namespace.block_size,
            len(part),
            prefix.namespace.block_bytes,
            part,
            min(self.keep_until[digest] for digest in part),
            self.refresh_s.get(part[0], 0.0),
        )

    def load(
        self, ref: port.ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> port.LoadResult:
        self.gate.wait(10)
        self.num_loads += 1
        assert isinstance(ref.locator, list)
        for place, digest in enumerate(ref.locator[:num_blocks]):
            if digest in self.faults:
                return port.LoadResult(place, self.faults[digest])
            if time.monotonic() > deadline:
                return port.LoadResult(place, port.LoadFault.DEADLINE)
            into[place * ref.block_bytes : (place + 1) * ref.block_bytes] = self.blocks[digest]
        return port.LoadResult(num_blocks)

    def store(self, extents: Sequence[tuple[port.Extent, port.Buffer]]) -> list[port.StoreResult]:
        if self.refusal is not None:
            return [self.refusal] * len(extents)
        for extent, payload in extents:
            width = extent.prefix.namespace.block_bytes
            for place, digest in enumerate(extent.digests):
                self.blocks[digest] = bytes(payload[place * width : (place + 1) * width])
                self.salts[digest] = extent.prefix.salts
                self.namespaces[digest] = extent.prefix.namespace
                self.keep_until[digest] = extent.keep_until
                self.refresh_s[digest] = extent.refresh_s
            self.listener.on_stored("disk", extent)
        return [port.StoreResult.STORED] * len(extents)

    def drop(self, digest: bytes) -> None:
        """Lose a block."""
        for known in (self.blocks, self.salts, self.namespaces, self.keep_until):
            del known[digest]

    def lease(self, prefix: port.Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        known = [digest for digest in prefix.digests if digest in self.blocks]
        self.keep_until.update(dict.fromkeys(known, keep_until))
        self.refresh_s.update(dict.fromkeys(known, refresh_s))
        return len(known) * prefix.namespace.block_size

    def use(self, prefix: port.Prefix, reuse: ReuseClass) -> None:
        self.uses.append((prefix, reuse))

    def erase(self, salt: bytes) -> list[port.TierReceipt]:
        gone = [digest for digest, salts in self.salts.items() if salt in salts]
        num_bytes = sum(len(self.blocks.pop(digest)) for digest in gone)
        for digest in gone:
            del self.salts[digest], self.namespaces[digest]
        return [port.TierReceipt("disk", "memory", len(gone), num_bytes)]

    def stats(self) -> list[port.TierStats]:
        limit, num = self.limit_bytes, len(self.blocks)
        return [port.TierStats("disk", "memory", "on", num_blocks=num, limit_bytes=limit)]

    def close(self) -> None:
        """Keep everything: the next engine finds it."""

"""What outsiders may expect of a cache: the holder of a lease, and a consumer of its events."""

import hashlib
from dataclasses import dataclass

from ostinato.core.identity import PrefixKey
from ostinato.core.tokens import pack_tokens
from ostinato.observe.events import BlockRemoved, BlockStored, EventBatch
from ostinato.tenants.terms import LeaseTerms


@dataclass
class LeaseExpectation:
    """A lease as its holder sees it.

    Attributes:
        key: The prefix that was asked for.
        num_tokens: How much of it stays.
        terms: For how long.
        expires_s: When it ends; None if it is pinned.
    """

    key: PrefixKey
    num_tokens: int
    terms: LeaseTerms
    expires_s: float | None

    def is_over(self, now_s: float) -> bool:
        """Whether its time is up."""
        return self.expires_s is not None and self.expires_s <= now_s

    def use(self, key: PrefixKey, num_tokens: int, now_s: float) -> bool:
        """Let a request use so many tokens; using all of the prefix may start the time anew.

        That others use the public prefix that it begins with does not: it would tell of them.
        """
        if key.identity != self.key.identity:
            return False
        ttl_s = self.terms.ttl_s if self.terms.refresh_on_hit else None
        if ttl_s is None or min(num_tokens, self.key.num_common_tokens(key)) < self.num_tokens:
            return False
        self.expires_s = now_s + ttl_s
        return True


class EventConsumer:
    """Rebuilds from the events alone which full blocks are cached, and recomputes their digests.

    Attributes:
        cached: Digest and group of each.
        num_batches: Received so far.
    """

    def __init__(self) -> None:
        self.cached: set[tuple[bytes, int]] = set()
        self.num_batches = 0

    def take(self, batch: EventBatch) -> None:
        """Receive a batch; none is missing."""
        assert batch.sequence == self.num_batches, "a batch was lost"
        assert batch.events, "a batch without events"
        self.num_batches += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.cached.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        parent: bytes | None = event.parent
        assert event.digests and len(event.tokens) == len(event.digests) * size
        if parent is None:
            parent = hashlib.sha256(event.identity.root.encoded).digest()
        for place, digest in enumerate(event.digests):
            name = pack_tokens(event.tokens[place * size : (place + 1) * size]).tobytes()
            parent = hashlib.sha256(parent + name + (event.extras[place] or b"")).digest()
            assert digest == parent, "a digest that its content does not have"
            assert (digest, event.group) not in self.cached, "stored twice"
            self.cached.add((digest, event.group))

    def _remove(self, event: BlockRemoved) -> None:
        assert event.digests, "a removal of nothing"
        for digest in event.digests:
            assert (digest, event.group) in self.cached, "removed, and never stored"
            self.cached.remove((digest, event.group))

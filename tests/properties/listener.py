"""What does a consumer of events know who has nothing but the stream?

It keeps the set of cached contents, by digest and group, and computes every digest that it is
told from the parent, the tokens and the extras that come with it.
"""

import hashlib

from ostinato.core.tokens import pack_tokens
from ostinato.observe.events import BlockRemoved, BlockStored, EventBatch


class Listener:
    """Rebuilds from the stream which full blocks are cached.

    Attributes:
        cached: Digest and group of each.
        num_batches: Heard so far.
    """

    def __init__(self) -> None:
        """Know of nothing."""
        self.cached: set[tuple[bytes, int]] = set()
        self.num_batches = 0

    def take(self, batch: EventBatch) -> None:
        """Hear a batch; none is missing."""
        assert batch.sequence == self.num_batches, "a batch was lost"
        assert batch.events, "a batch that says nothing"
        self.num_batches += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.cached.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent
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

"""References, owners and expected contents of a cache, recounted from its index and block tables.

Every prefix that a sequence has computed is noted by the digest of its last block, full or
partial, with the text that its slots must hold. Digests are computed here, from tokens and parents.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

from ostinato.assembly import PrefixCache
from ostinato.cache.pool import BlockPool
from ostinato.core.identity import Identity
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.hybrid.checkpoint import Checkpoint, HeldStates
from ostinato.hybrid.window_content import WindowCopy
from ostinato.observe.introspection import CachedBlock, cached_blocks
from ostinato.sched.sequence import Sequence
from tests.support.cache.cache_views import held_windows, windows_of
from tests.support.cache.fake_runner import FakeRunner


class RefcountOracle:
    """Recounts one cache from outside."""

    def __init__(self, cache: PrefixCache, runner: FakeRunner) -> None:
        self._cache = cache
        self._runner = runner
        self._size = cache.block_size
        self._identities: dict[bytes, Identity] = {}
        self._texts: dict[bytes, list[str]] = {}
        self._chains: dict[Sequence, tuple[Identity, list[bytes]]] = {}

    def know(self, identity: Identity) -> None:
        """Learn of an identity that something may be cached under."""
        self._identities[identity.encoded] = identity

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence has ended; what it computed may still be cached."""
        self._chains.pop(sequence, None)

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Note what the slots of running sequences hold once they are computed."""
        for sequence in sequences:
            if self._runner.knows(sequence.sequence_id):  # a child of this step says nothing new
                self._learn(sequence)

    # --- whose is what ---

    @property
    def pools(self) -> list[BlockPool]:
        """One per group."""
        return self._cache.manager.pools

    def contents(self) -> list[tuple[Identity, CachedBlock]]:
        """Return the full-attention group's contents with their identities, parents first."""
        found = sorted(
            cached_blocks(self._cache.manager.index), key=lambda cached: len(cached.parent)
        )
        return [(self._identity_of(cached), cached) for cached in found]

    def copies(self) -> Iterator[tuple[int, WindowCopy]]:
        """Walk what windows have published, each with its group."""
        for group, window in enumerate(windows_of(self._cache.manager), 1):
            for copy in window.copies():
                yield group, copy

    def checkpoints(self) -> Iterator[Checkpoint]:
        """Walk the states that are kept for prefixes."""
        states = self._cache.states
        for entry in () if states is None else (e for run in states.runs() for e in run.entries):
            assert isinstance(entry, Checkpoint)
            yield entry

    def private(self, sequence: Sequence) -> list[int]:
        """Count the private blocks of a running sequence, group by group, and its own states."""
        table = sequence.table
        assert table is not None
        counts = [len(table.private_blocks)]
        counts += [len(window.private_blocks) for window in held_windows(table)]
        if isinstance(held := [*table.held, None][len(counts) - 1], HeldStates):
            counts.append(len(held.blocks) + (held.saving is not None))
        return counts

    def residents(self, live: Iterable[Sequence]) -> list[Counter[bytes]]:
        """Count each tenant's blocks, group by group: published ones, and private ones."""
        counts: list[Counter[bytes]] = [Counter() for _ in self.pools]
        for identity, _ in self.contents():
            counts[0][identity.tenant] += 1
        for group, copy in self.copies():
            counts[group][copy.identity.tenant] += 1
        for checkpoint in self.checkpoints():
            counts[-1][checkpoint.identity.tenant] += 1
        for sequence in live:
            if sequence.table is not None:
                for group, count in enumerate(self.private(sequence)):
                    counts[group][sequence.table.tenant] += count
        return counts

    def leased(self, group: int) -> set[int]:
        """Return the blocks that leases hold in a group."""
        windows = windows_of(self._cache.manager)
        tables = self._cache.manager.tables.pinned.values()
        if group > len(windows):
            return {table.held[-1].source.block for table in tables if table.held[-1].source}
        null = None if not group else windows[group - 1].null_block
        return {block for table in tables for block in table.groups[group]} - {null}

    def stale(self) -> set[tuple[int, bytes]]:
        """Return group and digest of everything that was computed under old weights."""
        epoch = self._cache.manager.epoch
        found = {(0, digest) for identity, digest, _ in self.named() if identity.epoch < epoch}
        return found | {
            (group, copy.content.digest)
            for group, copy in [*self.copies(), *((-1, kept) for kept in self.checkpoints())]
            if copy.identity.epoch < epoch
        }

    def full(self) -> set[tuple[bytes, int]]:
        """Return digest and group of every full block that is findable."""
        whole = self._size * TOKEN_BYTES
        found = {(digest, 0) for _, digest, cached in self.named() if len(cached.tokens) == whole}
        copies = ((group, copy.content) for group, copy in self.copies())
        return found | {
            (content.digest, group) for group, content in copies if len(content.name) >= whole
        }

    def named(self) -> Iterator[tuple[Identity, bytes, CachedBlock]]:
        """Walk the full-attention group's contents with their digests."""
        digests = {encoded: _sha256(encoded) for encoded in self._identities}
        for identity, cached in self.contents():
            name = cached.tokens + cached.extra
            digest = digests[cached.parent + name] = _sha256(digests[cached.parent] + name)
            yield identity, digest, cached

    # --- what slots hold ---

    def check_slots(self) -> None:
        """Law 5: whatever is findable between steps is written, and is what it is found by."""
        for _, digest, cached in self.named():
            self._check(0, cached.block, digest, len(cached.tokens) // TOKEN_BYTES)
        for group, copy in self.copies():
            num_tokens = min(self._size, len(copy.content.name) // TOKEN_BYTES)
            self._check(group, copy.block, copy.content.digest, num_tokens)
        for checkpoint in self.checkpoints():
            found, text = (
                self._runner.states[checkpoint.block],
                self._texts[checkpoint.content.digest],
            )
            assert found == text[-1], f"slot {checkpoint.block}: {found}, not {text[-1]}"

    def _check(self, group: int, block: int, digest: bytes, num_tokens: int) -> None:
        start, texts = block * self._size, self._texts[digest]
        found = self._runner.stores[group][start : start + num_tokens]
        assert found == texts, f"group {group}, block {block}: {found}, not {texts}"

    def _learn(self, sequence: Sequence) -> None:
        key, size = sequence.key, self._size
        texts = self._runner.truth(sequence.sequence_id).texts
        identity, chain = self._chains.get(sequence, (key.identity, []))
        if not chain or identity != key.identity:
            chain = [_sha256(key.identity.root.encoded)]
            self._chains[sequence] = (key.identity, chain)
        for start in range((len(chain) - 1) * size, len(texts), size):
            for end in range(start + 1, min(start + size, len(texts)) + 1):
                extra = key.block_key(start, end).extra
                if extra and end - start < size:
                    continue  # only text is sealed
                name = key.tokens[start:end].tobytes() + extra
                digest = _sha256(chain[start // size] + name)
                self._texts[digest] = texts[start:end]
            if end - start == size:
                chain.append(digest)

    def _identity_of(self, cached: CachedBlock) -> Identity:
        place = cached.parent + cached.extra
        behind = [
            i for i in self._identities.values() if i.base is not None and i.extra(0) in place
        ]
        roots = [i for encoded, i in self._identities.items() if place.startswith(encoded)]
        return (behind or roots)[0]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()

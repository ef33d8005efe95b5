"""A cache small enough to draw: letters as tokens, state as text.

::

    cache = tiny_cache(num_blocks=4, block_size=4)
    cache.serve("ABCDEFGH")
    cache.match("ABCDEFXY").num_tokens      # 6: a block and two tokens of the next
    cache.picture()                         # "ABCD:evictable EFGH:evictable free free"

A step is one or more of ``plan``, ``advance`` and ``fork``, and then ``commit`` or ``fail``, as
the scheduler does it. ``admit``, ``append`` and ``serve`` are steps of their own. The cache's
invariants are checked after each of them.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from ostinato.assembly import build_cache
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import LeastRecentlyUsed
from ostinato.cache.manager import CacheManager
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.errors import PromptTooLong
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.hybrid.manager import HybridCacheManager
from ostinato.hybrid.window_content import WindowTable
from ostinato.hybrid.window_group import WindowGroup
from ostinato.indexes.block_hash import DigestFunction
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import DigestName, IndexName, PrefixCacheConfig
from ostinato.tenants.shares import TenantShares

on_both_indexes = pytest.mark.parametrize("index", get_args(IndexName))
"""Run a test once for each index."""


def tiny_cache(
    num_blocks: int,
    block_size: int = 4,
    index: IndexName = "radix",
    digest: DigestName | DigestFunction = "sha256",
    **settings: Any,
) -> "TinyCache":
    """Return an empty cache; ``settings`` are those of ``PrefixCacheConfig``."""
    if isinstance(digest, str):
        settings, digest = {**settings, "digest": digest}, None
    config = PrefixCacheConfig(
        num_blocks=num_blocks, block_size=block_size, index=index, **settings
    )
    return TinyCache(config, digest)


def prefix_key(prompt: str, images: Iterable[ImageSpan] = (), **identity: Any) -> PrefixKey:
    """Return the key of a prompt, a letter per token; ``identity`` as in ``Identity``."""
    return PrefixKey(Identity(**identity), [ord(letter) for letter in prompt], images)


def windows_of(manager: CacheManager) -> list[WindowGroup]:
    """Return a manager's sliding windows; none of a plain one."""
    groups = manager.layer_groups if isinstance(manager, HybridCacheManager) else ()
    return [group for group in groups if isinstance(group, WindowGroup)]


def held_windows(table: BlockTable) -> list[WindowTable]:
    """Return what a table holds in windows."""
    return [held for held in table.held if isinstance(held, WindowTable)]


def shares_of(pool: BlockPool) -> TenantShares:
    """Return the accounts of a pool; empty ones where all blocks are everyone's."""
    shares = pool.shares
    return shares if isinstance(shares, TenantShares) else TenantShares({}, LeastRecentlyUsed)


def letters(packed: "bytes | array[int]") -> str:
    """Return packed tokens as the letters they stand for."""
    tokens = packed if isinstance(packed, array) else array("I", packed)
    return "".join(map(chr, tokens))


@dataclass(eq=False)
class Sequence:
    """One sequence in the tiny cache.

    Attributes:
        table: Its blocks.
        copies: Slots that its admission or its fork copies.
        block_size: Tokens per block.
        num_computed: Leading tokens whose KV is written once the running step is over.
    """

    table: BlockTable
    copies: tuple[CopyRun, ...]
    block_size: int
    num_computed: int

    @property
    def blocks(self) -> list[int]:
        """Its block table."""
        return list(self.table.blocks)

    @property
    def num_shared(self) -> int:
        """Tokens that hit in whole blocks."""
        return self.table.num_shared_tokens

    @property
    def num_copied(self) -> int:
        """Tokens copied out of a block that the prompt leaves in its middle."""
        return self.table.num_copied_tokens

    @property
    def num_computed_here(self) -> int:
        """Tokens that went through the model for this sequence."""
        return self.num_computed - self.table.num_cached_tokens


class TinyCache:
    """A cache manager and the named sequences that it serves."""

    def __init__(self, config: PrefixCacheConfig, digest: DigestFunction | None = None) -> None:
        """Make an empty cache whose clock shows the number of steps so far."""
        self.num_steps = 0
        self.prefix_cache = build_cache(config, lambda: float(self.num_steps), digest)
        self.manager = self.prefix_cache.manager
        self.sequences: dict[str, Sequence] = {}
        self._step: list[Sequence] = []

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    def match(self, prompt: str, images: Iterable[ImageSpan] = (), **identity: Any) -> PrefixMatch:
        """Look a prompt up, and see to it that this changes nothing."""
        before = self.manager.describe()
        found = self.manager.match(prefix_key(prompt, images, **identity))
        assert self.manager.describe() == before, "a look-up changed something"
        return found

    def plan(
        self,
        name: str,
        prompt: str,
        *,
        upto: int | None = None,
        reads: bool = True,
        writes: bool = True,
        preempted: bool = False,
        images: Iterable[ImageSpan] = (),
        **identity: Any,
    ) -> Sequence | None:
        """Admit a prompt and compute its first ``upto`` tokens, all by default, in this step.

        Returns:
            None if it does not fit; then nothing has changed.
        """
        before = self.manager.describe()
        key = prefix_key(prompt, images, **identity)
        found = self.manager.match(key) if reads else self.manager.no_match()
        try:
            admitted = self.manager.admit(key, found, writes=writes, preempted=preempted)
        except PromptTooLong:  # it would not fit an empty cache either
            admitted = None
        if admitted is None:
            assert self.manager.describe() == before, "a refusal changed something"
            return None
        self.sequences[name] = sequence = Sequence(*admitted, self.block_size, 0)
        self.advance(name, len(prompt) if upto is None else upto)
        return sequence

    def advance(self, name: str, upto: int) -> None:
        """Compute a planned sequence's tokens up to position ``upto`` in this step."""
        sequence = self.sequences[name]
        sequence.num_computed = upto
        self.manager.publish(sequence.table, upto)
        if sequence not in self._step:
            self._step.append(sequence)
        self.prefix_cache.check()

    def fork(self, name: str, child: str) -> Sequence | None:
        """Make a second continuation of a sequence of this step; None if it does not fit."""
        parent, before = self.sequences[name], self.manager.describe()
        forked = self.manager.fork(parent.table, parent.num_computed)
        if forked is None:
            assert self.manager.describe() == before, "a refusal changed something"
            return None
        self.sequences[child] = sequence = Sequence(*forked, self.block_size, parent.num_computed)
        self._step.append(sequence)
        self.prefix_cache.check()
        return sequence

    def commit(self) -> None:
        """End the step: its forward pass has run."""
        self.num_steps += 1
        self.manager.commit(sequence.table for sequence in self._step)
        self._step.clear()
        self.prefix_cache.check()

    def fail(self) -> None:
        """End the step: its forward pass has raised."""
        self.num_steps += 1
        self.manager.fail(sequence.table for sequence in self._step)
        gone = set(map(id, self._step))
        self.sequences = {n: s for n, s in self.sequences.items() if id(s) not in gone}
        self._step.clear()
        self.prefix_cache.check()

    def admit(self, name: str, prompt: str, **how: Any) -> Sequence | None:
        """Admit a prompt in a step of its own; takes what ``plan`` takes."""
        sequence = self.plan(name, prompt, **how)
        self.commit()
        return sequence

    def append(self, name: str, tokens: str) -> bool:
        """Generate tokens, one step each.

        Returns:
            False, at the first token that does not fit.
        """
        sequence = self.sequences[name]
        for letter in tokens:
            table, before = sequence.table, self.manager.describe()
            if not self.manager.grow(table, len(table.key) + 1):
                assert self.manager.describe() == before, "a refusal changed something"
                return False
            table.key.append(ord(letter))
            self.advance(name, len(table.key))
            self.commit()
        return True

    def finish(self, name: str) -> None:
        """End a sequence: its blocks stay findable."""
        sequence = self.sequences.pop(name)
        self.manager.release(sequence.table, sequence.num_computed)
        self.prefix_cache.check()

    def serve(self, prompt: str, **how: Any) -> Sequence:
        """Admit, compute and finish a whole request; returns what became of it."""
        sequence = self.admit("served", prompt, **how)
        assert sequence is not None, f"{prompt} does not fit\n{self.manager.describe()}"
        self.finish("served")
        return sequence

    def blocks(self, name: str) -> list[int]:
        """Return a live sequence's block table."""
        return self.sequences[name].blocks

    def free_queue(self) -> str:
        """Return the free blocks in the order in which they would be given away."""
        return " ".join(map(str, self.manager.pool.free_order()))

    def picture(self) -> str:
        """Return content and state of each block, in order of ids.

        A sealed tail's letters end in ``~``; a private block shows what is computed of it.
        """
        pictures = ["free"] * self.manager.config.num_blocks
        for sequence in self.sequences.values():
            self._draw_private(sequence, pictures)
        for cached in cached_blocks(self.manager.index):
            text = letters(cached.tokens)
            text += "~" * (len(text) < self.block_size)
            pictures[cached.block] = f"{text}:{'held' if cached.ref_count else 'evictable'}"
        return " ".join(pictures)

    def window_picture(self, group: int = 1) -> str:
        """Return content and state of each block of a window group, in order of ids."""
        window = windows_of(self.manager)[group - 1]
        pictures = ["free"] * window.pool.num_blocks
        for sequence in self.sequences.values():
            held = held_windows(sequence.table)[group - 1]
            for place in range(held.first, len(held.blocks)):
                text = letters(
                    sequence.table.key.tokens[place * self.block_size :][: self.block_size]
                )
                pictures[held.blocks[place]] = f"{text or '-'}:private"
        for copy in window.copies():
            text = letters(copy.content.name)
            text += "~" * (not copy.content.full)
            pictures[copy.block] = f"{text}:{'held' if copy.ref_count else 'evictable'}"
        return " ".join(pictures)

    def window_blocks(self, name: str, group: int = 1) -> str:
        """Return a live sequence's table in a window group; a dot where it holds nothing."""
        null = windows_of(self.manager)[group - 1].null_block
        blocks = self.sequences[name].table.groups[group]
        return " ".join("." if block == null else str(block) for block in blocks)

    def _draw_private(self, sequence: Sequence, pictures: list[str]) -> None:
        computed = sequence.table.key.tokens[: sequence.num_computed]
        for position, block in enumerate(sequence.table.blocks):
            start = position * self.block_size
            text = letters(computed[start : start + self.block_size])
            pictures[block] = f"{text or '-'}:private"

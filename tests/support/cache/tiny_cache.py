"""A cache small enough to draw: letters as tokens, state as text.

::

    cache = tiny_cache(num_blocks=4, block_size=4)
    cache.serve("ABCDEFGH")
    cache.match("ABCDEFXY").num_tokens      # 6: a block and two tokens of the next
    cache.picture()                         # "ABCD:evictable EFGH:evictable free free"

A step is one or more of ``plan``, ``advance``, ``grow`` and ``fork``, and then ``commit`` or
``fail``, as the scheduler does it. ``admit``, ``append`` and ``serve`` are steps of their own.
Worked examples, the contract suite and drawn scenarios speak this language.

After each of these calls the cache checks itself, what sequences read and what is findable is
compared with slots of text (``StepStore``), and a plain cache with what ``CacheOracle`` predicts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ostinato.assembly import build_cache
from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import ImageSpan, PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.indexes.block_hash import DigestFunction
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import DigestName, IndexName, PrefixCacheConfig
from tests.support.cache.cache_views import held_windows, letters, prefix_key, windows_of
from tests.support.cache.predicted_manager import PredictedManager
from tests.support.cache.step_store import StepStore
from tests.support.cache.whole_state import whole_state


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
    """A cache manager and the named sequences that it serves.

    Attributes:
        sequences: Those that hold blocks, by name.
        released: Tables that were released, the last one last.
        counts: What has happened so far, and how often.
        calls: The manager beside its oracle.
    """

    def __init__(self, config: PrefixCacheConfig, digest: DigestFunction | None = None) -> None:
        """Make an empty cache whose clock shows the number of steps so far."""
        self.num_steps = 0
        self.prefix_cache = build_cache(config, lambda: float(self.num_steps), digest)
        self.manager = self.prefix_cache.manager
        self.sequences: dict[str, Sequence] = {}
        self.released: list[BlockTable] = []
        self.counts: Counter[str] = Counter()
        self.calls = PredictedManager(self.manager, config)
        self._store = StepStore(config, self.manager)
        self._step: list[Sequence] = []
        self._grown: list[tuple[Sequence, int]] = []

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    def match(self, prompt: str, images: Iterable[ImageSpan] = (), **identity: Any) -> PrefixMatch:
        """Look a prompt up, and see to it that this changes nothing."""
        return self.look_up(prefix_key(prompt, images, **identity))

    def look_up(self, key: PrefixKey) -> PrefixMatch:
        """Publish what has grown, look a key up, and see to it that this changes nothing."""
        self._publish_grown()
        before = whole_state(self.manager)
        found = self.calls.match(key)
        assert whole_state(self.manager) == before, "a look-up changed something"
        return found

    def plan(
        self,
        name: str,
        prompt: str | PrefixKey,
        *,
        upto: int | None = None,
        chunk: int | None = None,
        reads: bool = True,
        writes: bool = True,
        preempted: bool = False,
        images: Iterable[ImageSpan] = (),
        **identity: Any,
    ) -> Sequence | None:
        """Admit a prompt and compute its first ``upto`` tokens, all by default, in this step.

        ``chunk`` is how many tokens are computed at most behind those that hit.

        Returns:
            None if it does not fit; then nothing has changed.
        """
        key = prefix_key(prompt, images, **identity) if isinstance(prompt, str) else prompt
        self._publish_grown()
        found = self.calls.match(key) if reads else self.manager.match(key, 0)
        admitted = self.calls.admit(key, found, writes, preempted)
        if admitted is None:
            self.counts["refused"] += 1
            return None
        num_cached = admitted[0].num_cached_tokens
        assert num_cached < len(key), "law 4"
        self._count(found, *admitted)
        self._begin(name, *admitted, num_cached)
        end = len(key) if upto is None else upto
        self.advance(name, end if chunk is None else min(end, num_cached + chunk))
        return self.sequences[name]

    def advance(self, name: str, upto: int) -> None:
        """Compute a planned sequence's tokens up to position ``upto`` in this step."""
        self._publish(self.sequences[name], upto)
        self.check()

    def grow(self, name: str, chunk: int) -> bool:
        """Plan more tokens of a running sequence; they are findable from the next call on.

        Returns:
            False if there is no room for all of its tokens; then nothing has changed.
        """
        sequence = self.sequences[name]
        num_tokens = len(sequence.table.key)
        fits = self.calls.grow(sequence.table, num_tokens)
        if fits:
            self._grown.append((sequence, min(num_tokens, sequence.num_computed + chunk)))
        self.counts["no room to grow"] += not fits
        self.check()
        return fits

    def generate(self, name: str, letter: str) -> None:
        """Append a token to a sequence, to be computed in a later step."""
        self.calls.append(self.sequences[name].table, ord(letter))

    def is_in_step(self, name: str) -> bool:
        """Whether the running step computes a sequence, and its blocks are findable."""
        return self.sequences[name] in self._step

    def is_planned(self, name: str) -> bool:
        """Whether the running step computes a sequence."""
        return self.num_planned(name) is not None

    def num_planned(self, name: str) -> int | None:
        """Return how many of its tokens a sequence has computed after the running step."""
        sequence = self.sequences[name]
        grown = [upto for grown, upto in self._grown if grown is sequence]
        return next(iter([*grown, *([sequence.num_computed] * (sequence in self._step))]), None)

    def fork(self, name: str, child: str) -> Sequence | None:
        """Make a second continuation of a sequence of this step; None if it does not fit."""
        self._publish_grown()
        parent = self.sequences[name]
        forked = self.calls.fork(parent.table, parent.num_computed)
        if forked is not None:
            self._step += [parent] if parent not in self._step else []
            self._step.append(self._begin(child, *forked, parent.num_computed))
            self.counts["forked"] += 1
        self.check()
        return None if forked is None else self.sequences[child]

    def commit(self) -> None:
        """End the step: its forward pass has run."""
        self._publish_grown()
        self.num_steps += 1
        self._store.run(fails=False)
        step, self._step = self._step, []
        self.calls.commit([sequence.table for sequence in step])
        self.check()

    def fail(self) -> None:
        """End the step: its forward pass has raised."""
        self._publish_grown()
        self.num_steps += 1
        self._store.run(fails=True)
        step, self._step = self._step, []
        self.calls.fail([sequence.table for sequence in step])
        self.sequences = {n: s for n, s in self.sequences.items() if s not in step}
        self.released += [sequence.table for sequence in step]
        self.counts["failed with followers"] += len(step) > 1
        self.check()

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
            if not self.calls.grow(sequence.table, len(sequence.table.key) + 1):
                return False
            self.generate(name, letter)
            self.advance(name, len(sequence.table.key))
            self.commit()
        return True

    def finish(self, name: str) -> None:
        """End a sequence, or preempt it: its blocks stay findable."""
        sequence = self.sequences.pop(name)
        self._grown = [grown for grown in self._grown if grown[0] is not sequence]
        self.calls.release(sequence.table, sequence.num_computed)
        self.released.append(sequence.table)
        self.check()

    def reset(self) -> None:
        """Forget every prefix, while nothing runs."""
        self.calls.reset(self.prefix_cache.admin.reset)
        self.check()

    def serve(self, prompt: str, **how: Any) -> Sequence:
        """Admit, compute and finish a whole request; returns what became of it."""
        sequence = self.admit("served", prompt, **how)
        assert sequence is not None, f"{prompt} does not fit\n{whole_state(self.manager)}"
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
            text += "~" * (len(text) < self.block_size)
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

    # --- what is compared ---

    def check(self) -> None:
        """Check the cache itself, all that the oracle predicts, and what sequences read."""
        self.prefix_cache.check()
        self.calls.check(None if self._step else self._store.slots)
        self._store.check()

    # --- small print ---

    def _begin(
        self, name: str, table: BlockTable, copies: tuple[CopyRun, ...], num_cached: int
    ) -> Sequence:
        self._store.follow((table, copies), num_cached)
        sequence = Sequence(table, copies, self.block_size, num_cached)
        self.sequences[name] = sequence
        return sequence

    def _count(self, found: PrefixMatch, table: BlockTable, copies: tuple[CopyRun, ...]) -> None:
        self.counts["admitted"] += 1
        self.counts["shared"] += bool(table.num_shared_tokens)
        self.counts["copied"] += bool(copies)
        self.counts["copy given up"] += found.tail is not None and not copies

    def _publish(self, sequence: Sequence, upto: int) -> None:
        self.calls.publish(sequence.table, upto)
        sequence.num_computed = upto
        if sequence not in self._step:
            self._step.append(sequence)

    def _publish_grown(self) -> None:
        grown, self._grown = self._grown, []
        for sequence, upto in grown:
            self._publish(sequence, upto)

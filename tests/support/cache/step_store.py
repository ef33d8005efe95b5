"""What steps write, copy and save, as text; and whether all that a cache finds was committed."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.hybrid.checkpoint import Checkpoint
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.cache_views import letters, windows_of
from tests.support.cache.fake_kv import Chunk, FakeKV, spell

Given = tuple[BlockTable, tuple[CopyRun, ...]]


@dataclass(eq=False)
class Followed:
    """What the store knows of a live table.

    Attributes:
        table: Its blocks.
        num_written: Leading tokens whose slots are written, or are to be copied to.
        has_state: Whether its running state was loaded, or copied from its parent's.
        texts: What the slots of its tokens have to hold.
    """

    table: BlockTable
    num_written: int
    has_state: bool = False
    texts: list[str] = field(default_factory=list)

    def chunk(self, end: int) -> Chunk:
        """Describe its tokens from those that are written up to ``end``."""
        self.texts = spell(self.table.key, self.texts)
        return Chunk(self.table.table_id, self.table.groups, self.texts, self.num_written, end)


class StepStore:
    """The slots of a cache whose steps are what its manager has been told."""

    def __init__(self, config: PrefixCacheConfig, manager: CacheManager) -> None:
        """Make a store in which nothing was ever written."""
        self._size = config.block_size
        self._manager = manager
        self._kv = FakeKV(config)
        self._copies: list[CopyRun] = []
        self._followed: list[Followed] = []

    @property
    def slots(self) -> list[str]:
        """What the slots of full attention hold."""
        return self._kv.stores[0]

    def follow(self, given: Given, num_tokens: int) -> None:
        """Follow a new table, of which so many tokens are written once its copies have run."""
        self._followed.append(Followed(given[0], num_tokens))
        self._copies += given[1]

    def run(self, fails: bool) -> None:
        """Load, write, copy and save what a step does, all of it torn if it fails."""
        self._drop_released()
        loads, saves = self._manager.state_copies
        self._kv.load_states(loads)
        running = [f for f in self._followed if f.table.num_planned > f.num_written]
        chunks = [followed.chunk(followed.table.num_planned) for followed in running]
        copies, self._copies = self._copies, []
        self._kv.write(chunks, copies, fails)
        loaded = {load.target for load in loads}
        for followed in self._followed:
            followed.has_state |= followed.table.state_slot in loaded
        for followed, chunk in zip(running, chunks, strict=True):
            if not fails:
                self._kv.read(chunk)
            self._check_state(followed)
            followed.num_written = chunk.end
            if followed.has_state:
                self._kv.states[followed.table.state_slot] = chunk.texts[chunk.end - 1]
        self._kv.save_states((*loads, *saves) if fails else saves, fails)
        for followed in self._followed:
            if not fails:
                followed.has_state = followed.table.state_slot is not None
            elif followed.table.state_slot in loaded:
                followed.has_state = False

    def check(self, keys: Iterable[PrefixKey] = ()) -> None:
        """Compare, between steps, what tables and matches of keys read with what it has to be."""
        self._drop_released()
        targets = [load.target for load in self._manager.state_copies[0]]
        assert len(targets) == len(set(targets)), "two states are loaded into one slot"
        if self._manager.tables.step or self._manager.tables.decodes:
            return
        for followed in self._followed:
            self._kv.read(followed.chunk(followed.num_written))
            self._check_state(followed)
        for key in keys:
            self._check_match(self._manager.match(key, len(key)), spell(key))
        for contents in self._manager.contents:
            for entry in [entry for run in contents.runs() for entry in run.entries]:
                if isinstance(entry, Checkpoint):
                    self._check_checkpoint(entry)
        for window, kv in zip(windows_of(self._manager), self._kv.stores[1:], strict=True):
            for copy in window.copies():
                for offset, letter in enumerate(self._text(copy.content.name)):
                    found = kv[copy.block * self._size + offset]
                    is_right = found.endswith((letter, ">"))  # or a part of an image
                    assert is_right, f"a window has {found!r} for {letter}"

    def _drop_released(self) -> None:
        tables = self._manager.tables
        self._followed = [f for f in self._followed if f.table.live_in is tables]

    def _check_match(self, match: PrefixMatch, texts: list[str]) -> None:
        """Compare what is found in full attention with what it has to be (law 5)."""
        kv, size = self._kv.stores[0], self._size
        for position in range(match.num_shared_tokens):
            found = kv[match.blocks[position // size] * size + position % size]
            assert found == texts[position], f"token {position} is found as {found!r}"
        for offset in range(match.num_copied_tokens):
            assert match.tail is not None
            found = kv[match.tail.block * size + offset]
            assert found == texts[match.num_shared_tokens + offset], f"a tail has {found!r}"

    def _check_state(self, followed: Followed) -> None:
        """Compare a sequence's running state with its tokens so far."""
        if followed.has_state:
            end, state = followed.num_written, self._kv.states[followed.table.state_slot]
            assert state == (followed.texts[end - 1] if end else ""), (
                f"{state!r} after {end} tokens"
            )

    def _check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Compare a saved state with the number of its tokens, and with the last of them."""
        found = self._kv.states[checkpoint.block]
        tokens = "".join(part.partition(":")[2] for part in found.split("|"))
        assert len(tokens) == checkpoint.num_tokens, f"a checkpoint has {found!r}"
        assert tokens.endswith(self._text(checkpoint.content.name)), f"a checkpoint has {found!r}"

    def _text(self, name: bytes) -> str:
        """Return the letters of a block's name, without what boundaries add to it."""
        return letters(name[: self._size * TOKEN_BYTES])

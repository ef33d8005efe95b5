"""KV without tensors: that of a token is the text that it stands for.

A slot holds whose text it is and all of it up to and including its own token, such as
``"tenant:ABC"`` for the C of ABCD, or ``"public:AB|tenant:C"`` after a public prefix AB. Since that
is all that KV depends on, reading a slot tells whether it is the right one (law 3), and a sequence
that reads a slot before it is written reads what was there before (law 5).

A step writes every new token, then makes all copies at once; then every sequence reads all that is
before it and its own new tokens. Every group of layers has slots of its own. What a window does not
reach is not read, and may be anything; what it reaches has to be there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.plan import CopyRun, StateCopy
from ostinato.settings import PrefixCacheConfig

NEVER_WRITTEN = "never written"

TORN = "torn"
"""What a failed step leaves in the slots that it was to write."""


def spell(key: PrefixKey, known: Sequence[str] = ()) -> list[str]:
    """Return what the slot of each token holds; ``known`` are those of its first tokens."""
    texts = list(known)
    text = texts[-1] if texts else spell_identity(key.identity.root)
    for position in range(len(texts), len(key)):
        if position and position == key.identity.start:
            text += "|" + spell_identity(key.identity)
        text += spell_token(key.tokens[position], position, key.images)
        texts.append(text)
    return texts


def spell_identity(identity: Identity) -> str:
    """Return what the text of every slot of that identity begins with."""
    epoch, kv_dtype = str(identity.epoch or ""), identity.kv_dtype
    others = [_text(identity.weights), epoch, kv_dtype, _text(identity.adapter)]
    return "/".join([_text(identity.tenant), *filter(None, others)]) + ":"


def spell_token(token: int, position: int, images: Iterable[ImageSpan]) -> str:
    """Return a letter, or which part of which image the token stands for."""
    for image in images:
        if image.start <= position < image.end:
            return f"<{_text(image.digest)} {position - image.start}/{image.length}>"
    return chr(token)


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


@dataclass(frozen=True)
class Chunk:
    """What a step computes of one sequence.

    Attributes:
        name: Of the sequence.
        tables: Its blocks in each group.
        texts: What the slots of its tokens have to hold.
        start: The first token that is computed.
        end: The token after the last one.
    """

    name: object
    tables: Sequence[Sequence[int]]
    texts: Sequence[str]
    start: int
    end: int


class FakeKV:
    """The slots of one cache, and steps that write, copy and read them.

    Attributes:
        stores: What each slot holds, group by group.
        states: What each slot of a state holds: the text of all tokens before; of none, nothing.
    """

    def __init__(self, config: PrefixCacheConfig) -> None:
        """Make a store in which nothing was ever written."""
        self.block_size = config.block_size
        self.windows = (None, *(window.window for window in config.windows))
        pools = (config.num_blocks, *(window.num_blocks for window in config.windows))
        self.stores = [[NEVER_WRITTEN] * (n * config.block_size) for n in pools]
        num_states = 0 if config.states is None else config.states.num_slots
        self.states = [NEVER_WRITTEN] * num_states

    def first_read(self, group: int, position: int) -> int:
        """Return the first token that a query sees in a group of layers."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def write(self, chunks: Sequence[Chunk], copies: Sequence[CopyRun], fails: bool) -> None:
        """Write a step's new tokens and make its copies; both are torn if it fails halfway."""
        groups = range(len(self.stores))
        writes = [(self._written(chunks, group), self._copied(copies, group)) for group in groups]
        for kv, (written, copied) in zip(self.stores, writes, strict=True):
            assert not written.keys() & copied.keys(), "a copy and a new token in one slot"
            assert not copied.keys() & set(copied.values()), "a copy reads what another one writes"
            for slot, text in written.items():
                kv[slot] = TORN if fails else text
            for target, source in copied.items():
                kv[target] = TORN if fails else kv[source]

    def load_states(self, loads: Iterable[StateCopy]) -> None:
        """Copy states to running slots; without a source, that of no tokens."""
        for copy in loads:
            self.states[copy.target] = "" if copy.source is None else self.states[copy.source]

    def save_states(self, saves: Iterable[StateCopy], fails: bool) -> None:
        """Copy states out of running slots; they are torn if the step fails halfway."""
        for copy in saves:
            self.states[copy.target] = TORN if fails else self.states[copy.source]

    def read(self, chunk: Chunk) -> None:
        """Law 3: what a sequence attends to is its own prefix, all of it, and in place."""
        assert len(chunk.tables) == len(self.stores), "a table per group"
        assert len(set(chunk.tables[0])) == len(chunk.tables[0]), "a block twice in a table"
        for group, kv in enumerate(self.stores):
            for position in range(self.first_read(group, chunk.start), chunk.end):
                found = kv[self._slot(chunk, group, position)]
                assert found == chunk.texts[position], (
                    f"sequence {chunk.name} reads {found!r} at token {position} in group {group}, "
                    f"not {chunk.texts[position]!r}"
                )

    def _written(self, chunks: Iterable[Chunk], group: int) -> dict[int, str]:
        """Return the step's new tokens in one group, slot by slot."""
        written: dict[int, str] = {}
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                slot = self._slot(chunk, group, position)
                assert slot not in written, "two tokens of a step in one slot"
                written[slot] = chunk.texts[position]
        return written

    def _copied(self, copies: Iterable[CopyRun], group: int) -> dict[int, int]:
        """Return the step's copies in one group, slot by slot: target and source."""
        copied: dict[int, int] = {}
        for run in [run for run in copies if run.group == group]:
            assert run.num_tokens > 0, "nothing to copy"
            for first in (run.source, run.target):
                last = first + run.num_tokens - 1
                assert first // self.block_size == last // self.block_size, "crosses a block"
            for offset in range(run.num_tokens):
                assert run.target + offset not in copied, "two copies into one slot"
                copied[run.target + offset] = run.source + offset
        return copied

    def _slot(self, chunk: Chunk, group: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        slot = chunk.tables[group][block] * self.block_size + offset
        assert slot < len(self.stores[group]), f"token {position} has no slot in group {group}"
        return slot

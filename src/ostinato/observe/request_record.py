"""The record of one served sequence.

A record begins at admission and ends when the blocks are released. While the sequence lives, its
tokens are the live ones; afterwards they are kept beside the blocks that held them, so that it can
be said later which of them were lost::

    tokens     ABCD EFGH IJ
    blocks     7    9    3
    findable   all ten of them if the partial block was published, else the first eight
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.observe.prefix_digests import PrefixDigests


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sequence that was admitted.

    Attributes:
        number: Its number in the history.
        identity: Its identity.
        images: Images among its tokens.
        num_prompt_tokens: Tokens at its admission.
        num_shared: Of those, how many hit in whole blocks.
        num_copied: How many were copied after them.
        num_seen: How many had cached blocks, if a state was missing to use all of them.
        num_awaited: How many of the shared ones another request computed after this one arrived,
            or in the same step; they are the last of the shared ones.
        awaited: The request that computed them.
        at_s: When it was admitted, by the clock.
        name: The request's.
        is_first: Whether this was the request's first admission, the one that is explained.
        writes: Whether it writes to the cache.
        off: The setting that kept it from reading the cache; empty if it read.
        prompt_sections: Names and texts of the request's messages and fields, in order.
        num_kept: Prompt tokens of earlier answers that stand as they were generated.
        table_id: Id of its block table.
        key: The live sequence; None when it has ended.
        kept: Its packed tokens when it has ended, made when they are first read; empty if
            none are kept.
        unpacked: Its tokens until then, of which the first ``num_unpacked`` count: a preempted
            sequence continues in the same array.
        num_unpacked: See ``unpacked``.
        digests: If no token is kept, digests of its prefixes.
        num_computed: Its first tokens that were computed or hit.
        num_findable: Its first tokens that others could find when it ended.
        blocks: The blocks that held them, perhaps with more at the end.
        num_blocks: How many of them others could find.
        ended: When its blocks were released, in the history's numbers; None while it runs.
        charge: What it takes of the history's memory, in tokens.
    """

    number: int
    table_id: int
    identity: Identity
    images: tuple[ImageSpan, ...]
    num_prompt_tokens: int
    num_shared: int
    num_copied: int
    num_seen: int = 0
    num_awaited: int = 0
    awaited: str = ""
    at_s: float = 0.0
    name: str = ""
    is_first: bool = True
    writes: bool = True
    off: str = ""
    prompt_sections: tuple[tuple[str, str], ...] = ()
    num_kept: int = 0
    key: PrefixKey | None = None
    kept: bytes = b""
    unpacked: "array[int] | None" = None
    num_unpacked: int = 0
    digests: PrefixDigests | None = None
    num_computed: int = 0
    num_findable: int = 0
    blocks: Sequence[int] = ()
    num_blocks: int = 0
    ended: int | None = None
    charge: int = 0

    @property
    def tokens(self) -> bytes:
        """Its tokens as far as known, packed; copied when they are first read."""
        if self.key is not None:
            return self.key.tokens.tobytes()
        if self.unpacked is not None:
            self.kept, self.unpacked = self.unpacked[: self.num_unpacked].tobytes(), None
        return self.kept

    @property
    def prompt(self) -> bytes:
        """Packed tokens of its prompt; empty if none are kept."""
        return self.tokens[: self.num_prompt_tokens * TOKEN_BYTES]

    @property
    def num_hits(self) -> int:
        """Prompt tokens that it did not compute."""
        return self.num_shared + self.num_copied

    def end(self, key: PrefixKey) -> None:
        """Keep the tokens of a sequence that has ended."""
        self.key, self.unpacked, self.num_unpacked = None, key.tokens, len(key.tokens)

    def lived_at(self, number: int) -> bool:
        """Whether it was running at that number of the history."""
        return self.number < number and (self.ended is None or self.ended > number)

    def num_common(self, other: "RequestRecord", tokens: bytes) -> int:
        """Return the length of its common prefix with another's prompt.

        Images are compared, identities are not.
        """
        common = num_common_tokens(self.tokens, tokens)
        images, other_images = set(self.images), set(other.images)
        return min([common, *(image.start for image in images ^ other_images)])

    def clear(self) -> None:
        """Drop its content."""
        self.key, self.kept, self.images, self.prompt_sections = None, b"", (), ()
        self.unpacked, self.num_unpacked, self.digests = None, 0, None
        self.blocks, self.num_blocks = (), 0

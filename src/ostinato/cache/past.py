"""What is remembered of content that comes back?

The pool counts blocks and never looks at content. Policies that go by use do: what was evicted and
is asked for again was worth more than they thought, and the time since a conversation's last turn
tells how soon the next one comes::

    look_up   what a request asks for and did not find      before anything is evicted for it
    recall    what was known of blocks that it publishes    when they are published
    gap       how long ago the deepest of what it found was let go of
"""

from collections.abc import Callable

from ostinato.cache.accounts import Accounts
from ostinato.cache.block import CacheEntry
from ostinato.cache.policies.contract import Recall, Turn
from ostinato.core.identity import PrefixKey

MANY_USES = 20
"""Content that was in use more often is shared: it tells nothing of one conversation's pace."""


class Past:
    """What the policies of one pool remember.

    Attributes:
        remembers: Whether they do: whether they want to know what is looked up and published.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float]) -> None:
        """Ask the policies of these accounts."""
        self.remembers = accounts.common.policy.remembers
        self._accounts = accounts
        self._clock = clock

    def look_up(
        self, key: PrefixKey, num_found: int, num_asked: int, block_size: int, turn: Turn
    ) -> None:
        """Note what a request asks for, when it holds what it found; counts are in blocks."""
        if self.remembers:
            policy = self._accounts.of(key.identity.owner).policy
            policy.look_up(key, num_found, num_asked, block_size, turn)

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, turn: Turn | None
    ) -> Recall:
        """Say what is remembered of blocks that are published anew.

        Args:
            key: The sequence.
            first: The first of its blocks that is not cached.
            most: How many of them are published.
            block_size: Tokens per block.
            turn: Of the request that publishes them: learns of the gap, or of new blocks.

        Returns:
            What is true of the first of them, one at least.
        """
        if not self.remembers:
            return Recall(most)
        policy = self._accounts.of(key.identity.owner).policy
        recalled = policy.recall(key, first, most, block_size, turn)
        if turn is not None:
            if recalled.idle_since_s is None:
                turn.num_new_blocks += recalled.num_blocks
            else:
                self.note_gap(turn, recalled.uses, recalled.idle_since_s)
        return recalled

    def note_gap(self, turn: Turn, uses: int, idle_since_s: float) -> None:
        """Note the time since content was let go of that a request found."""
        turn.gap_s = self._clock() - idle_since_s if uses < MANY_USES else None

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Remember nothing of what was evicted and belongs to something."""
        for account in self._accounts:
            account.policy.forget(belongs)

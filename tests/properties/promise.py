"""What was somebody promised who leased a prefix?"""

from dataclasses import dataclass

from ostinato.core.identity import PrefixKey
from ostinato.tenants.terms import LeaseTerms


@dataclass
class Promise:
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

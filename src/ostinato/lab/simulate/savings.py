"""The tokens that a shared prefix saves.

Many requests share a prefix, end differently, and the cache is cold::

    request 1   S S S S S S S S S S a a      all computed, then cached
    request 2   S S S S S S S S S S b b      S found as far as the cache can, the rest computed
    request 3   S S S S S S S S S S c c      the same

It does not matter whether they arrive one after another or all at once: requests that share a
prefix wait for, or share the step of, the one that computes it (law 1). How much a follower
finds depends on the cache:

* by whole blocks, as vLLM does: the shared length rounded down to the block size;
* by token: the slots of the last, partly shared block are copied (copy-on-write), so that
  every shared token is found.

At least one token of each request is computed, since a query is needed (law 4): of a prompt
of ``n`` tokens at most ``n - 1`` are found.

The question is that of the "prefix savings accountant" in many courses on serving; the
article "Adding Prefix Caching to NanoGPT" asks it for 1,000 calls with one system prompt of
512 tokens and answers 511,488 tokens saved. That is 999 x 512, and holds where every request
brings at least one token of its own; for 1,000 *identical* prompts of 512 tokens 999 of those
tokens are computed after all.
"""

from dataclasses import dataclass

from ostinato.core.config import check_minimum
from ostinato.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with a shared prefix.

    Attributes:
        shared_tokens: Tokens that all prompts begin with.
        suffix_tokens: Tokens that each prompt has of its own after them; they differ from
            the first one on. With 0, all prompts are identical.
        num_requests: Requests, on a cold cache that is large enough.
        block_size: Tokens per block of the cache.
    """

    shared_tokens: int
    suffix_tokens: int
    num_requests: int
    block_size: int = 16

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ConfigError: A count is out of range, or the prompts are empty.
        """
        check_minimum("shared", self.shared_tokens, 0)
        check_minimum("suffix", self.suffix_tokens, 0)
        check_minimum("requests", self.num_requests, 1)
        check_minimum("block_size", self.block_size, 1)
        if self.prompt_tokens == 0:
            raise ConfigError("shared=0 and suffix=0: the prompts are empty; raise one of the two")

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.shared_tokens + self.suffix_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts, which is what goes through the model without a cache."""
        return self.num_requests * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Reuse:
    """The tokens that requests reuse and compute.

    Attributes:
        workload: The requests.
        matched_tokens: Tokens that each request after the first finds in whole blocks.
        copied_tokens: Tokens that each of them finds beyond, by copying slots of a block.
    """

    workload: Workload
    matched_tokens: int
    copied_tokens: int = 0

    @property
    def computed_per_request_tokens(self) -> int:
        """Tokens that each request after the first computes; at least 1 (law 4)."""
        return self.workload.prompt_tokens - self.matched_tokens - self.copied_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed by the model."""
        followers = self.workload.num_requests - 1
        return self.workload.prompt_tokens + followers * self.computed_per_request_tokens

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that are not computed."""
        return self.workload.total_tokens - self.computed_tokens

    @property
    def needs_a_sealed_tail(self) -> bool:
        """Whether the block that is copied from is not even full in the first prompt.

        Such a block is found only once its request has ended and sealed it, so requests that
        arrive at once cannot copy from it.
        """
        block_end = self.matched_tokens + self.workload.block_size
        return self.copied_tokens > 0 and block_end > self.workload.prompt_tokens

    @property
    def saved_share(self) -> float:
        """Saved tokens as a share of all prompt tokens, 0 to 1."""
        return self.saved_tokens / self.workload.total_tokens


def without_cache(workload: Workload) -> Reuse:
    """Return the reuse without a cache: none."""
    return Reuse(workload, matched_tokens=0)


def by_whole_blocks(workload: Workload) -> Reuse:
    """Return the reuse of whole blocks.

    Source: vLLM, "Automatic Prefix Caching"; SGLang with a page size above 1.
    """
    return Reuse(
        workload, matched_tokens=_in_whole_blocks(_findable(workload), workload.block_size)
    )


def by_token(workload: Workload) -> Reuse:
    """Return the reuse when a partly shared block is copied up to its last shared token.

    The first block that a request leaves in its middle is copied, as far as it is shared; so
    the block size decides what is copied, and nothing else.
    """
    findable = _findable(workload)
    matched = _in_whole_blocks(findable, workload.block_size)
    return Reuse(workload, matched_tokens=matched, copied_tokens=findable - matched)


def as_figures(workload: Workload) -> dict[str, object]:
    """Return a workload and what each kind of cache reuses, as plain values for JSON."""
    return {
        "shared_tokens": workload.shared_tokens,
        "suffix_tokens": workload.suffix_tokens,
        "num_requests": workload.num_requests,
        "block_size": workload.block_size,
        "all_prompt_tokens": workload.total_tokens,
        "without_cache": _figures(without_cache(workload)),
        "by_whole_blocks": _figures(by_whole_blocks(workload)),
        "by_token": _figures(by_token(workload)),
    }


def _figures(reuse: Reuse) -> dict[str, object]:
    return {
        "found_per_request_tokens": reuse.matched_tokens,
        "copied_per_request_tokens": reuse.copied_tokens,
        "computed_per_request_tokens": reuse.computed_per_request_tokens,
        "computed_tokens": reuse.computed_tokens,
        "saved_tokens": reuse.saved_tokens,
        "saved_share": reuse.saved_share,
    }


def _findable(workload: Workload) -> int:
    """Shared tokens that any cache may find: all but the one that law 4 keeps back."""
    return min(workload.shared_tokens, workload.prompt_tokens - 1)


def _in_whole_blocks(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size * block_size

"""Whether an engine drafts, and from which texts.

Drafts leave answers as they are only where a row of a step has the same bits alone and beside
others: in the native library's forward pass and attention. A layer with a state cannot take a wrong
row back; such models go without. Windows slide by the rows that are certain, so what a wrong row
still needs of a window is held until the step after it.
"""

from collections.abc import Callable

from ostinato.drafts.drafter import DraftCounts, Drafter
from ostinato.drafts.tree_text import TreeText
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.setup import ModelSetup
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.scheduling.learned_prices import LearnedPrices

MIN_WEIGHT_BYTES = 32 * 2**20
"""Weights from which on a step takes longer than planning rows in it."""


class Drafting:
    """The drafts of one engine.

    Attributes:
        why_not: Why there are none; empty if there are.
        tree: The text of cached blocks; an observer of the cache.
    """

    def __init__(self, config: EngineConfig, setup: ModelSetup) -> None:
        """Decide, and make the index of cached text."""
        self.why_not = why_no_drafts(config, setup)
        self.tree: TreeText | None = None
        self._drafter: Drafter | None = None
        if not self.why_not and config.enable_prefix_caching:
            self.tree = TreeText(setup.sizes.num_blocks, config.block_size)

    def drafter(self, prices: LearnedPrices, is_paused: Callable[[], bool]) -> Drafter | None:
        """Return what drafts, other than while it is paused; None if nothing does."""
        self._drafter = None if self.why_not else Drafter(prices, self.tree, is_paused)
        return self._drafter

    @property
    def counts(self) -> DraftCounts:
        """Drafted tokens since the start, by source."""
        return DraftCounts() if self._drafter is None else self._drafter.counts


def why_no_drafts(config: EngineConfig, setup: ModelSetup) -> str:
    """Return why an engine computes one token per sequence and step; empty if it drafts."""
    sizes, runner = setup.sizes, setup.runner
    if config.drafts == "off":
        return "drafts='off' is set"
    if sizes.states is not None:
        return "its layers carry states, which cannot take a wrong token back"
    fused = setup.loaded.fused
    has_bits = fused is not None and fused.promises_bits
    if not (has_bits and isinstance(runner.attention, NativeAttention)):
        return "a row may have other bits beside others than alone"
    if setup.loaded.size.num_bytes < MIN_WEIGHT_BYTES:
        return f"a step of less than {MIN_WEIGHT_BYTES >> 20} MiB of weights is too short"
    return ""

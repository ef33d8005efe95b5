"""SGLang's radix tree with its Rust core, called as its scheduler calls it.

The memory behind it is a stack of pages of our own, which costs less than SGLang's allocator: the
figures show the tree. Its wheel is unpacked beside the virtual environment, not installed.
"""

import sys
from array import array
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import answer_questions
from benchmarks.peers.workers.manager_scenes import BLOCK_SIZE, ManagerWorker
from benchmarks.peers.workers.stand_ins import StandIns

ROW = 40_960
"""Tokens that one request may have."""


class PageStack:
    """Free pages; SGLang's own allocator for pages joins tensors at every release."""

    device = "cpu"

    def __init__(self, num_tokens: int) -> None:
        """All pages are free."""
        import torch

        self.top = num_tokens // BLOCK_SIZE
        self.pages = torch.arange(self.top, dtype=torch.int64)
        self.inside = torch.arange(BLOCK_SIZE)

    def available_size(self) -> int:
        """Free tokens."""
        return self.top * BLOCK_SIZE

    def alloc(self, num_tokens: int) -> Any:
        """Take whole pages; returns the slot of each token in them."""
        start = self.top + -num_tokens // BLOCK_SIZE
        assert start >= 0, "the scenes leave room for all"
        taken, self.top = self.pages[start : self.top], start
        return (taken[:, None] * BLOCK_SIZE + self.inside).reshape(-1)

    def free(self, slots: Any) -> None:
        """Take pages back."""
        self.free_segment(slots)

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        """Take pages back, by the slots of their tokens."""
        pages = slots[::BLOCK_SIZE] // BLOCK_SIZE
        self.pages[self.top : self.top + len(pages)] = pages
        self.top += len(pages)


class SGLangManager(ManagerWorker):
    """``UnifiedRadixCache`` in pages of 16."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Import the tree alone."""
        import torch
        import torch._dynamo
        import torch._inductor.utils
        import transformers  # noqa: F401 - real ones, before anything stands in

        torch.set_num_threads(1)
        sys.path.insert(0, str(Path(sys.executable).parents[1] / "unpacked"))
        sys.meta_path.insert(0, StandIns())
        import sglang.version
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache

        # Nothing is imported while the clock runs.
        self.torch = torch
        self.params, self.radix = base_prefix_cache, radix_cache
        taken = {"page_size": BLOCK_SIZE, "core": "rust"}
        return {"version": sglang.version.__version__, "settings": taken}

    def make(self, num_tokens: int) -> None:
        """Begin with an empty tree."""
        import torch
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pool = PageStack(num_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=BLOCK_SIZE,
        )
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = "rust"
        self.tree = UnifiedRadixCache(params)
        self.row = torch.zeros(ROW, dtype=torch.int32)

    def take(self, tokens: Any) -> int:
        """Look-up, lock, slots, publication behind the prefill, publication at the end, unlock."""
        ids, match = array("q", tokens), self.params.MatchPrefixParams
        wanted = self.radix.RadixKey(ids, limit=len(tokens) - 1)
        matched = self.tree.match_prefix(match(key=wanted))
        num_hits, lock = matched.device_prefix_len, self.tree.lock(matched.last_device_node)
        if num_hits:
            self.row[:num_hits] = self.tree.path_device_indices(matched.last_device_node)
        new = self.pool.alloc(len(tokens) - num_hits)
        self.row[num_hits : len(tokens)] = new[: len(tokens) - num_hits]
        key, num_whole = self._insert(ids, num_hits)
        matched = self.tree.match_prefix(match(key=key))
        indices = self.tree.path_device_indices(matched.last_device_node)
        self.row[num_hits:num_whole] = indices[num_hits:num_whole]
        self.tree.unlock(lock)
        lock = self.tree.lock(matched.last_device_node)
        self._insert(ids, num_whole)
        if num_whole < len(tokens):
            self.pool.free_segment(self.row[num_whole : len(tokens)])
        self.tree.unlock(lock)
        return int(num_hits)

    def _insert(self, ids: "array[int]", num_known: int) -> tuple[Any, int]:
        """Publish what fills whole pages; the tree returns pages that it had already."""
        key = self.radix.RadixKey(ids).page_aligned(BLOCK_SIZE)
        slots = self.row[: len(key)].to(self.torch.int64, copy=True)
        self.tree.insert(self.params.InsertParams(key=key, value=slots, prev_prefix_len=num_known))
        return key, len(key)


if __name__ == "__main__":
    answer_questions(SGLangManager())

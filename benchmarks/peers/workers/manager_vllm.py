"""vLLM's KV cache manager, called as its scheduler calls it; SHA-256 is its default hash."""

import os
from typing import Any

from benchmarks.peers.protocol import answer_questions
from benchmarks.peers.workers.manager_scenes import BLOCK_SIZE, ManagerWorker

HASH = "sha256"


class VLLMManager(ManagerWorker):
    """Hashes are made with the request; blocks are published when they are allocated."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load the manager and its hash function."""
        import vllm
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        function = get_hash_fn_by_name(HASH)
        init_none_hash(function)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, function)
        from vllm import SamplingParams
        from vllm.v1.request import Request

        # Nothing is imported while the clock runs.
        self.made = 0
        self.sampling, self.request = SamplingParams, Request
        return {"version": vllm.__version__, "settings": {"block_size": BLOCK_SIZE, "hash": HASH}}

    def make(self, num_tokens: int) -> None:
        """Begin with an empty cache."""
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        config = KVCacheConfig(
            num_blocks=num_tokens // BLOCK_SIZE,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.cache = KVCacheManager(
            config,
            max_model_len=131_072,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def take(self, tokens: Any) -> int:
        """Hashing, look-up, allocation, the worker's block ids, release."""
        self.made += 1
        params = self.sampling(max_tokens=16)
        request = self.request(str(self.made), tokens, params, None, block_hasher=self.hasher)
        blocks, num_hits, *_ = self.cache.get_computed_blocks(request)
        allocated = self.cache.allocate_slots(request, len(tokens) - num_hits, num_hits, blocks)
        assert allocated is not None, "the scenes leave room for all"
        self.cache.get_block_ids(request.request_id)
        self.cache.free(request)
        return int(num_hits)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answer_questions(VLLMManager())

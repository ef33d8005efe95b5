"""Types for the ids of blocks, slots, requests and sequences."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in the pool, ``0 <= id < num_blocks``."""

SlotId = NewType("SlotId", int)
"""One token's place in the KV store: ``block_id * block_size + offset``."""

RequestId = NewType("RequestId", str)
"""Name of a request, unique among live requests; chosen by the caller or the engine."""

SequenceId = NewType("SequenceId", int)
"""Number of one sampled continuation of a request, unique for the life of an engine."""

BlockDigest = NewType("BlockDigest", bytes)
"""Content hash of a full block and everything before it."""

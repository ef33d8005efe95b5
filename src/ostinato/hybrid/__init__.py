"""Sliding windows: a cache manager for models whose layers keep different things.

Files in reading order:

* ``pool_sizes``: how many blocks each group of layers gets of a given memory
* ``window_content``: what a window keeps of a block, and what a sequence holds of it
* ``window_group``: the blocks of all layers with one window size
* ``manager``: ``HybridCacheManager``, which keeps full attention and windows in step

Rules:

1. A hit is one length that is valid in every group of layers.
2. Of a window, the blocks that a prefix's end needs are enough; they are found by SHA-256 digest.
"""

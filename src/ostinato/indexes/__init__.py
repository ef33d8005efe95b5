"""The hash index: prefixes found by chained digest, as in vLLM; an alternative to the radix tree.

Files in reading order:

* ``block_hash``: chained digests of blocks, and digest functions by name
* ``block_copy``: blocks that hold the same content, and what one request holds
* ``hash_index``: ``HashIndex``, the port ``cache.prefix_index`` over a map of digests

Rules:

1. A digest is never trusted: parent and tokens are compared as well (law 3).
"""

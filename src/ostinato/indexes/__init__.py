"""The hash index: prefixes found by chained digest, as in vLLM; the reference beside the tree.

Files in reading order:

* ``digests``: digest functions by name
* ``hash_content``: what the index keeps of a block, and what a request holds
* ``hash_walk``: walks over the index, for pictures and checks
* ``hash_index``: ``HashIndex``, the port ``cache.prefix_index`` over a map of digests

Rules:

1. A digest is never trusted: parent and tokens are compared as well (law 3).
"""

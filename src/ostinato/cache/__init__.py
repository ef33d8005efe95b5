"""Which prefixes are cached, where, and for which requests: the heart, without a tensor.

Files in reading order:

* ``block``: blocks, the states they are in, and the entries that indexes keep of them
* ``eviction``: the ports of eviction policies and of who may take whose blocks, and LRU
* ``prefix_index``: the port of prefix indexes
* ``block_table``: the blocks of one sequence, and copies on write; the live tables, and the
  calls that they rule out
* ``observer``: the port of observers of what the cache does
* ``pool``: a fixed number of blocks: which are allocated next, and what is evicted for them
* ``child_index``: the children of one prefix
* ``radix_index``: prefixes found by walking a tree
* ``manager``: admission, growth, publication and release of block tables

Four ports (``EvictionPolicy``, ``BlockShares``, ``PrefixIndex``, ``CacheObserver``) are all that
other rooms plug into; ``hybrid`` extends the manager. ``ostinato.assembly`` puts them together.

Rules:

1. A block is unused, private, held or evictable: exactly one of them. Without live tables and
   pins all are free: unused or evictable (law 9).
2. What is found is exactly what was asked for: identity, tokens and images are compared,
   never only their digests (law 3). Windows alone trust a digest, SHA-256.
3. A cached block's ancestors are cached; tails are evicted before roots (law 8).
4. Look-ups change nothing; references are taken at admission. ``admit``, ``grow`` and ``fork`` do
   all or nothing (law 6).
5. Both indexes give the same answers on the same content.
6. Calls in a wrong order, or from a second thread, are refused before anything changes.
7. An observer that raises is detached; the change that it was called for is finished.
"""

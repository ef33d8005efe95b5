"""Which prefixes are cached, where, and for which requests: the heart, without a tensor.

Files in reading order:

* ``block``: blocks, the states they are in, and the entries that indexes keep of them
* ``free_list``: queues of what can be given away: blocks without content, and entries to evict
* ``eviction``: the port of eviction policies, and LRU
* ``block_shares``: the port of who may take whose blocks, and the pool that all share
* ``pool``: a fixed number of blocks, and which are given away next
* ``block_hash``: chained digests of blocks
* ``prefix_index``: the port of prefix indexes
* ``child_index``: the children of one prefix
* ``radix_node``, ``radix_walk``, ``radix_index``: prefixes found by walking a tree
* ``block_table``: which blocks one sequence holds
* ``observer``: the port of observers: who is told of what the cache does
* ``allocator``: takes blocks for a table, evicting what they hold
* ``copy_on_write``: the slots that are copied in the running step
* ``manager``: admission, growth, publication and release of block tables

Four ports (``EvictionPolicy``, ``BlockShares``, ``PrefixIndex``, ``CacheObserver``) are all that
other rooms plug into; ``ostinato.assembly`` puts them together.

Rules:

1. A block is free, private, held or evictable: exactly one of them.
2. What is found is exactly what was asked for: identity, tokens and images are compared,
   never only their digests (law 3). Windows alone trust a digest, SHA-256.
3. A cached block's ancestors are cached; tails are evicted before roots (law 8).
4. Look-ups change nothing; references are taken at admission (law 6).
5. Both indexes give the same answers on the same content.
6. Calls in a wrong order are refused before anything changes; one thread at a time.
"""

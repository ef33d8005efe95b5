"""Which prefixes are cached, where, and for whom? The heart, without a tensor.

Files in reading order, the plain path first:

* ``block``: what is a block, and which states can it be in?
* ``free_queue``: which entry is given away next?
* ``policies``: which cached entry is worth least?
* ``accounts``: whose blocks are they, and who may evict whose?
* ``scratch``: which empty block is given away next?
* ``past``: what is remembered of content that comes back?
* ``pool``: who holds which block?
* ``siblings``: which cached blocks may follow a prefix?
* ``block_hash``: when are two prefixes the same?
* ``prefix_index``: the contract every index keeps
* ``radix_node``, ``radix_match``, ``radix_path``, ``radix_growth``, ``radix_walk``,
  ``radix_index``: how are prefixes found by walking a tree?
* ``hash_content``, ``hash_walk``, ``hash_index``: how are prefixes found by chained digest?
* ``window_content``, ``window_group``: what do layers with a sliding window keep?
* ``visit``: what is remembered of one sequence that was served?
* ``block_table``: which blocks does one sequence hold?
* ``histogram``, ``stats``: what did the cache do so far?
* ``survey``: what lies in the cache, and what is it good for?
* ``chronicle``: what was cached, and why did it go?
* ``events``, ``journal``: what is noted of what happens, and what may outsiders learn?
* ``allocator``: how are blocks taken for somebody?
* ``sampler``, ``simulated_cache``, ``estimator``, ``sampling_window``, ``ghost``: what would other
  pool sizes and other policies find?
* ``group_pools``, ``group_match``, ``groups``: what does a sequence hold, over all groups of
  layers at once?
* ``group_room``: how many tokens would fit?
* ``group_state``: what do all groups hold, and does it add up?
* ``lease_book``, ``lease_limits``, ``custody``: what may an administrator ask?
* ``step_copies``: which slots are copied in this step?
* ``manager``: what may the scheduler ask?
* ``explain``, ``difference``: why did each token of a prompt miss?

Rules:

1. A block is scratch, private, held or evictable: exactly one of them.
2. What is found is exactly what was asked for: identity, tokens and images are compared,
   never only their digests (law 3). Windows alone trust a digest, SHA-256.
3. A cached block's ancestors are cached; tails are evicted before roots (law 8). Of a window,
   the blocks that a prefix's end needs are enough.
4. Look-ups change nothing; references are taken at admission (law 6).
5. Both indexes give the same answers on the same content.
"""

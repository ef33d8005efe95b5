"""One solution per lab, each a file of its own that imports nothing of Ostinato.

* ``blocks``, ``radix``: prefix maps, by chained digests and as a tree
* ``eviction``: reference counts and a policy
* ``tails``: single tokens of a block, and copies
* ``step``: what a scheduler's step computes
* ``read_once``: attention over shared prefixes
* ``router``: a worker for a request
* ``explain``: why tokens missed
"""

"""The ghost: estimates of what other pool sizes and policies would find of the traffic.

Files in reading order:

* ``estimator``: how much more or less a simulation finds than another, and how sure that is
* ``sampler``: chooses a share of all blocks
* ``simulated_cache``: small caches that replay the sample
* ``sampling_window``: one window of the traffic, and what is replayed in it
* ``ghost``: ``Ghost``, an observer of the cache

Rules:

1. Nothing here decides anything: the cache does the same with and without a ghost.
"""

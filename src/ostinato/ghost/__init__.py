"""The ghost: estimated hit rates of other pool sizes and eviction policies.

Files in reading order:

* ``estimator``: estimates the difference of two simulations, with its error
* ``sampler``: chooses a share of all blocks
* ``simulated_cache``: small caches that replay the sample
* ``sampling_window``: one window of sampled traffic and its simulations
* ``ghost``: ``Ghost``, an observer of the cache

Rules:

1. Nothing here decides anything: the cache does the same with and without a ghost.
"""

"""The values that every room shares: nothing here computes or waits.

Files in reading order:

* ``ids``: names of blocks, slots, requests and sequences
* ``tokens``: checks and packs token ids
* ``identity``: what must be equal before KV may be shared
* ``sampling_params``: what the scheduler and the sampler read of a user's parameters
* ``request``: a request, and what observers of the cache learn of it
* ``plan``: the plan of one step and its result
* ``setting``: declares a setting once, and checks it
* ``config``: settings of the cache and the scheduler
* ``errors``: the tree of exceptions

Rules:

1. Imports no other room, and neither torch nor transformers.
2. Values are immutable, except ``PrefixKey``, which only grows.
"""

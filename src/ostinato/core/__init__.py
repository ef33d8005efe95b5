"""The words that every room shares. Values only: nothing here computes or waits.

Files in reading order:

* ``ids``: names of a token, a block, a request
* ``tokens``: checks and packs token ids
* ``identity``: what must be equal before KV may be shared
* ``structured_outputs``: the form that an output must have
* ``keywords``: which keywords of another engine are accepted, and what is said about the others
* ``sampling_params``: what a user may ask of the sampler
* ``request``: what is known about one request
* ``plan``: what one step is asked to do, and what came back
* ``tenancy``: what a tenant is entitled to, and what is left after it was erased
* ``config``: what a user may set
* ``pool_sizes``: how many blocks each group of layers gets of a given memory
* ``errors``: what can go wrong

Rules:

1. Imports nothing of the other rooms, and neither torch nor transformers.
2. Values do not change, but for ``PrefixKey``, which only grows.
"""

"""Which words does every room share? Values only: nothing here computes or waits.

Files in reading order:

* ``ids``: what do we call a token, a block, a request?
* ``tokens``: how are token ids checked and packed?
* ``identity``: what must be equal before KV may be shared?
* ``structured_outputs``: what form must an output have?
* ``keywords``: which keywords of another engine are accepted, and what is said about the others?
* ``sampling_params``: what may a user ask of the sampler?
* ``request``: what is known about one request?
* ``plan``: what is one step asked to do, and what came back?
* ``tenancy``: what is a tenant entitled to, and what is left after it was erased?
* ``lease``: how long shall a prefix be kept, and what was promised?
* ``explanation``: why did a prompt miss?
* ``config``: what may a user set?
* ``pool_sizes``: how many blocks does each group of layers get of a given memory?
* ``pseudonyms``: by which names are tokens and tenants written down?
* ``trace``: how is what happened written down, so that it can be replayed and not be read?
* ``errors``: what can go wrong?

Rules:

1. Imports nothing of the other rooms, and neither torch nor transformers.
2. Values do not change, but for ``PrefixKey``, which only grows.
"""

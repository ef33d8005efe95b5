"""Mixtures of experts: routing, and all experts of a layer as one packed weight.

Modules of ``transformers`` are replaced one for one: a router and the experts of a block, each by a
module with the same call and result. What composes them (shared experts, scales) stays.

Files in reading order:

* ``families``: what is known of the routers and experts of ``transformers``, as data
* ``stack``: the weights of all experts of a layer, below each other
* ``routers``: chooses the experts of each row
* ``mixture``: the experts of a layer as own products

Rules:

1. A row's result has the same bits alone and in a batch of any size.
2. Each expert's weights are read once per step, and only if a row goes to it.
3. An unknown module stays as it is, with the reason in ``compute_path``.
"""

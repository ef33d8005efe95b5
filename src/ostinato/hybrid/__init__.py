"""Sliding windows and states: groups of layers that keep something else than full attention.

Files in reading order:

* ``pool_sizes``: how many blocks and states each group of layers gets of a given memory
* ``window_content``: what a window keeps of a block, and what a sequence holds of it
* ``checkpoint``: saved states, the order of their eviction, and what a sequence holds
* ``placement``: at which few positions of a prompt a state is saved
* ``prefill_cuts``: where a prefill is cut so that its state can be kept
* ``layer_group``: the port of layers that keep something else than full attention
* ``window_group``: the blocks of all layers with one window size
* ``state_group``: the states of all layers that keep one
* ``manager``: the cache manager of a model with several groups of layers

Rules:

1. A hit is one length that is valid in every group of layers.
2. A hit needs the blocks of a window before its end, not those before them; they are found by
   SHA-256 digest.
3. With states, a hit ends at the deepest checkpoint; what follows is computed again, and its
   blocks are kept once.
"""

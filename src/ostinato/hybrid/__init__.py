"""Sliding windows and states: groups of layers that keep something else than full attention.

Files in reading order:

* ``pool_sizes``: how many blocks and states each group of layers gets of a given memory
* ``window_content``: what a window keeps of a block, and what a sequence holds of it
* ``checkpoint``: saved states, which of them is worth least, and what a sequence holds
* ``placement``: which few positions of a prompt deserve a checkpoint
* ``prefill_cuts``: where a prefill is cut so that its state can be kept
* ``layer_group``: the port of layers that keep something else than full attention
* ``window_group``: the blocks of all layers with one window size
* ``state_group``: the states of all layers that keep one
* ``manager``: the cache manager, a group of layers after the other

Rules:

1. A hit is one length that is valid in every group of layers.
2. Of a window, the blocks that a prefix's end needs are enough; they are found by SHA-256 digest.
3. Of a state, a hit ends at the deepest checkpoint; what follows is computed again, and its
   blocks are kept once.
"""

"""Loads prefixes from tiers, and writes them there, beside the steps.

Files in reading order:

* ``threads``: daemon threads for calls of tiers
* ``prefixes``: converts the keys of sequences to the prefixes of tiers
* ``groups``: what each group of layers keeps in tiers, and what a hit needs of it
* ``look_up``: finds the longest prefix that tiers have for every group
* ``load_note``, ``reader``, ``loads``: load prefixes from tiers into the pool
* ``stores``, ``events``: write prefixes to tiers, and announce what tiers have
* ``erasures``: erase tenants from tiers in the background
* ``tiered_cache``, ``open_tiers``: the tiers of one engine, and how they are opened
* ``waits``: for whose work requests wait
"""

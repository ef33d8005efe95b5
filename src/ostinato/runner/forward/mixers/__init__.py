"""Layers with a state as operations of the library.

Files in reading order:

* ``records``: what a mixer computes, and C structures for its operations
* ``stand_ins``: finds out what a module with a state computes
"""

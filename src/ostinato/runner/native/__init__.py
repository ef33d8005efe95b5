"""Calls into the native library.

A shared object with a plain C ABI, built from ``native/`` when the package is installed; where it
is missing, everything runs in plain torch. Files in reading order:

* ``ctypes_api``: the library's structures and functions as Python sees them
* ``library``: loads the library, and asks what this processor can do
* ``checks``: checks arguments before the library sees a pointer
* ``pages``: takes memory for keys and values from the kernel
* ``packed``: a weight in tiles, and products with it
* ``argmax``: the largest number of each row
* ``delta``: the step of a gated delta rule
* ``store``: a store of keys and values that the library reads

Rules: no bound is checked in C++, so every one is checked here, before the call. Planning is the
exception, since it walks over all tables anyhow: there it is lengths that are checked here, and the
library looks at what the tables say before it uses it. What it plans is right by construction
and goes back to it unseen. C++ keeps no pointer longer than the call that it was passed to, and an
object that stores pointers for later calls, as a program of the forward does, keeps what they point
to alive.
"""

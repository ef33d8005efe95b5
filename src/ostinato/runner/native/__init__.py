"""Calls into the native library.

A shared object with a plain C ABI, built from ``native/`` when the package is installed; without
it, everything runs in plain torch. Files in reading order:

* ``ctypes_api``: the library's structures and functions in Python
* ``library``: loads the library, and chooses its instruction set
* ``checks``: checks arguments before the library gets a pointer
* ``packed``: a weight in tiles, and products with it
* ``scale_tiles``: scales of a quantized weight, in the layouts of the library
* ``code_packing``: packs rows of blocks, numbers or codes as tiles of a quantized weight
* ``argmax``: the largest number of each row
* ``angles``: frequencies and angles of RoPE with the same bits on every system
* ``sampling``: sampling, and log-probabilities
* ``scan``: the gated delta rule, Mamba 2 and short convolutions over a prompt
* ``store``: a KV store that the library reads, and the memory pages of it

Rules: C++ checks no bounds, so all are checked here, before the call. Planning is the exception,
since it reads all tables anyway: here only lengths are checked, and the library checks the content
of the tables before it uses it. Its plans are valid by construction, and are passed back to it
unchecked. C++ keeps no pointer longer than the call that it was passed to; an object that stores
pointers for later calls, such as a program of the forward, keeps what they point to alive.
"""

"""Keys and values in blocks.

Files in reading order:

* ``kv_codes``: keys and values in 8 bits
* ``kv_store``: the interface of KV stores
* ``plain_store``: a KV store in plain tensors
* ``block_copies``: copies of blocks between a store and host memory
* ``layer_groups``: which layers share block tables
"""

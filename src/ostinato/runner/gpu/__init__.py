"""Attention and KV stores for GPUs: one source in Triton. Never run on a GPU so far.

Files in reading order:

* ``availability``: whether Triton can compute a case
* ``read_parts``: plans which program reads which keys for which rows
* ``kernels``: the kernels; the only file that imports Triton
* ``backend``: the attention backend and its KV store

Rules:

1. Importing the room does not import Triton; the first step does, or the first write of a store.
2. No other room names a kernel: the room plugs in as an attention backend.
3. Where parts end depends on positions and on the row's own sequence, never on the device.
4. Keys and values have the layout of ``kv.plain_store``, so tiers copy blocks as they do for torch.
"""

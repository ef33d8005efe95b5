"""Attention, KV stores, forwards and whole steps for GPUs, in Triton. Never run on a GPU so far.

Files in reading order:

* ``availability``: whether Triton can compute a case
* ``read_parts``: plans which program reads which keys for which rows
* ``read_planner``: plans reads, those of the next decodes while a step runs
* ``kernels``: attention and the store, in Triton
* ``fused_kernels``: norms, heads, gates and products, in Triton
* ``attention_step``: one step of attention, and its KV store
* ``step_tables``: copies all tables of a step to the device in one piece
* ``padding``: pads decodes to few sizes
* ``device_sampling``: samples within a step
* ``step_graphs``: captures steps as CUDA graphs
* ``device_steps``: whole steps from tables to token ids
* ``device_weights``: weights that torch multiplies, or in fixed tiles, or as codes
* ``device_forward``: runs a described decoder with these products and kernels
* ``backend``: the attention backend

Rules:

1. Importing the room does not import Triton; the first step does, or the first write of a store.
2. No other room names a kernel: the room plugs in as an attention backend and as a forward. Only
   the two files of kernels import Triton.
3. Where parts end depends on positions and on the row's own sequence, never on the device.
4. Keys and values have the layout of ``kv.plain_store``, so tiers copy blocks as they do for torch.
5. A whole step reads tables on the device, and every other number is in its key: a captured step
   may be replayed.
"""

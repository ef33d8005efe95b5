"""Attention over scattered blocks, one file per backend.

Files in reading order:

* ``backend``: the interface of an attention backend
* ``shared_runs``: finds the runs of blocks that several sequences of a step share
* ``reads``: plans which keys the queries of a step read in torch
* ``softmax``: a softmax computed in parts
* ``torch_backend``: attention in plain torch, on any device and in any dtype
* ``native_backend``: attention by the native library, on a CPU: plans, and runs them
* ``registration``: registers attention with the models of ``transformers``
* ``mask_request``: checks the model's own mask against its layers' windows
"""

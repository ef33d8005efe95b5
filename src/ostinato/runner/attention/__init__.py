"""How does a query read scattered blocks? One file per backend.

Files in reading order:

* ``backend``: what is attention asked to do, and who may answer?
* ``shared_runs``: which runs of blocks do several sequences share?
* ``read_plan``: what does it take to read a step?
* ``reads``: which sequences are read together?
* ``gathers``: how do scattered blocks become keys and values?
* ``folding``: how do rows become rectangles, and back?
* ``softmax``: how is a softmax computed in parts?
* ``cascade``: how is a shared run read once?
* ``torch_backend``: the answer in plain torch, on any device and in any dtype;
* ``native_plan``: what does the native library need to know to read a step?
* ``native_backend``: the answer of the native library, on a CPU;
* ``choice``: the native library, or plain torch?
* ``registration``: how do the models of ``transformers`` call us?
* ``mask_request``: which keys would the model's own mask have let a query see?
"""

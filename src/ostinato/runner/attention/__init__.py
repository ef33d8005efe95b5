"""How does a query read scattered blocks? One file per backend.

Files in reading order:

* ``backend``: what is attention asked to do, and who may answer?
* ``reads``: which sequences are read together?
* ``torch_backend``: the answer in plain torch, on any device and in any dtype;
* ``registration``: how do the models of ``transformers`` call us?
* ``mask_request``: which keys would the model's own mask have let a query see?
"""

"""``LoRARequest`` where programs written for vLLM import it.

Files in reading order:

* ``request``: ``LoRARequest``

Rules:

1. Defines nothing: adapters are part of ``engine``.
"""

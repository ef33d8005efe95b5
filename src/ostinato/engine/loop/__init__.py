"""The loop: requests in, steps, outputs and events out.

Files in reading order:

* ``kv_events_wire``, ``kv_events_publisher``: the format of KV events, and the socket
* ``adapters``: loaded LoRA adapters by name, and unloaded ones until their requests end
* ``request_factory``: makes requests, checked in full, with identities that say who may share KV
* ``trace_writer``, ``recorder``: record what happens to an engine
* ``recomputation``, ``audit``: compute a share of the hits again, and compare
* ``idle_rebase``: computes the prompt that will follow an answer, while the engine is idle
* ``drafting``: whether an engine drafts, and from which texts
* ``engine``: the loop
* ``snapshot``: copies of its counters, explanations of its requests
* ``batch``: batches, with a progress bar and Ctrl-C
"""

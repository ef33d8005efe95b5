"""Caches and schedulers for tests, and oracles for both.

Files:

* ``tiny_cache``, ``tiny_scheduler``: small enough to draw: letters as tokens, state as text
* ``fake_kv``, ``step_store``: KV without tensors; what steps write, copy and save, as text
* ``fake_runner``: executes plans on slots of text, in place of a model
* ``cache_oracle``: a slow, obvious cache that predicts the real one
* ``refcount_oracle``: references, owners and contents, recounted from the index and block tables
* ``predicted_manager``: a cache manager whose every call the oracle has predicted
* ``wrong_calls``: calls that are wrong, whatever state the manager is in
* ``step_checks``: what must be true of every step
* ``whole_state``: the whole state of a cache as text
* ``cache_views``: keys of letters, windows, and tenants' shares
* ``timed_scheduler``: steps take what a price list says, in simulated time
* ``hard_traffic``, ``adversary``: traffic that is hard on policies that learn
"""

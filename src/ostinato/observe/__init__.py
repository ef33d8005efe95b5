"""Observers of the cache: counters, KV events, history, explanations.

Files in reading order:

* ``counters``: counters and histograms of the cache
* ``events``, ``event_recorder``: the log of KV events
* ``prefix_digests``, ``history``: served requests, and blocks lost since
* ``explanation``, ``prompt_diff``, ``explain``: why each token of a prompt missed
* ``introspection``: what is cached now, and which prefixes save most

Rules:

1. Nothing here decides anything: the cache does the same with and without observers.
2. Everything that is kept is bounded.
"""

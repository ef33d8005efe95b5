"""Replays traffic through the real cache, request by request.

Files in reading order:

* ``replay``: replays a recorded run and compares its hits
* ``tier_model``: a simulated disk behind the pool: its contents and load times
* ``serial_replay``: the hits of a cache of a given size and policy on a trace
* ``explain_log``: explains the misses of each request of a log or of a recorded run
* ``word_tokens``: a tokenizer for logs without a model
"""

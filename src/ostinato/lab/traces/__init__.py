"""Traffic as tokens, block ids or recorded events.

Files in reading order:

* ``recording``: a recorded run
* ``block_trace``: traffic as block ids instead of tokens
* ``trace_builder``: packs requests with named blocks into compact arrays
* ``hash_traces``: reads public traces, which list hashes of blocks instead of tokens
* ``traces``: reads traces of traffic of any kind
"""

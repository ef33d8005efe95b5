"""Waiting orders beyond first come, first served; they plug into ``sched.waiting_queue``.

Files in reading order:

* ``longest_prefix``: longest cached prefix first, and what all ranked orders share
* ``depth_first``: requests that share a prefix, one after another
* ``fair_share``: the tenant that was served least
* ``held_requests``: passes over requests that wait for a load

Rules:

1. A later request overtakes an earlier one at most ``max_overtakes`` times.
"""

"""Which request computes what in this step. Policy, without a tensor.

Files in reading order:

* ``sequence``: one continuation of a request, and its chunk of a step
* ``admission``: whether a request can ever be served, and when it has gone far enough
* ``waiting_queue``: the waiting queue, and the port of waiting orders
* ``single_flight``: whose prefix is being computed right now
* ``request_table``: which sequences are live, and which of them hold blocks
* ``step_planner``: what one step computes, and how many tokens fit into it
* ``scheduler``: which sequences run, wait for another, or are preempted
* ``stats``: counters of what the scheduler did

Rules:

1. A step is plan, then commit or fail; whatever else changes state happens between steps.
2. No prompt token is computed twice while its KV is cached or being computed (law 1).
3. No sequence waits for one that makes no progress.
4. When no request is live, no block is held (law 9).
"""

"""Which request computes what in this step. Policy, without a tensor.

Files in reading order:

* ``sequence``: one continuation of a request, and its chunk of a step
* ``admission``: whether a request can ever be served, and when it has gone far enough
* ``waiting_queue``: the waiting queue, the port of waiting orders, and all live sequences
* ``step_planner``: what one step computes, and which prefill others wait for
* ``scheduler``: which sequences run, wait for another, or are preempted
* ``stats``: counters of what the scheduler did

Rules:

1. A step is plan, then commit or fail; whatever else changes state happens between steps.
2. No prompt token is computed twice while its KV is cached or being computed (law 1).
3. No sequence waits for one that makes no progress.
4. When no request is live, no block is held (law 9).
"""

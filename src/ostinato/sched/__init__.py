"""Continuous batching: what each step computes, and for which request; without a tensor.

Files in reading order:

* ``sequence``: one continuation of a request, and its chunk of a step
* ``waiting_queue``: the port of waiting orders, all live sequences, and counters
* ``step_planner``: what one step computes, and which prefill others wait for
* ``scheduler``: add, plan, commit, fail, finish, cancel; the limits of a sequence

Rules:

1. A step is plan, then commit or fail; whatever else changes state happens between steps.
2. No prompt token is computed twice while its KV is cached or being computed (law 1).
3. Every decode gets its token in every step, and the first prefill at least one. No sequence is
   admitted in a step in which a running one got nothing, so that no sequence waits for a prefill
   that makes no progress.
4. A sequence that shares blocks of a step is planned after their publisher;
   ``CacheManager.fail`` relies on it.
5. A preempted sequence keeps its tokens and its place; its blocks stay findable.
6. The head of the queue is never skipped if it does not fit, only if it waits for a prefill.
7. When no request is live, no block is held (law 9).
"""

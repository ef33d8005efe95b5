"""Who computes what in this step? Policy, without a tensor.

Files in reading order:

* ``sequence``: where does one continuation of a request stand?
* ``admission``: can this request ever be served, and when has it gone far enough?
* ``budget``: how much fits into a step?
* ``orders``: in which order are the waiting tried?
* ``depth_first``: which of the waiting share a prefix, and who of them is next?
* ``fair_share``: which tenant has been served least so far?
* ``waiting``: who is next?
* ``flight``: whose prefix is being computed right now?
* ``roster``: who is live, and who of them holds blocks?
* ``chunk``: what does one sequence get of a step, and what does the step bring it?
* ``step``: what does one step compute?
* ``scheduler``: who runs, who waits for whom, who is preempted?
* ``stats``: what did the scheduler do so far?

Rules:

1. A step is plan, then commit or fail; whatever else changes state happens between steps.
2. No prompt token is computed twice while its KV is cached or being computed (law 1).
3. Nobody waits for a sequence that makes no progress.
4. When no request is live, nobody holds a block (law 9).
"""

"""Waiting orders, step times and beam search; they plug into the ports of ``sched``.

Files in reading order:

* ``step_prices``: what the work of a step costs
* ``price_fit``: fits these prices to measured steps
* ``learned_prices``: keeps them current, tells the machine's pace, and bounds steps by time
* ``ranked_orders``: longest cached prefix first, or the prompt with the least left to compute
* ``fair_share``: the tenant that was served least
* ``held_requests``: passes over requests that wait for a load
* ``beam_search``: which beams of a request go on

Rules:

1. A later request overtakes an earlier one at most ``max_overtakes`` times.
2. There is one price list of a step: orders, step times, the choice between loading and computing,
   metrics and the simulator read it.
"""

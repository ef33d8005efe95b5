"""Simulates policies, sizes and load, and draws the results.

Files in reading order:

* ``savings``: the tokens that a shared prefix saves
* ``timed_replay``: replays a load in time: TTFT, queues, and occupancy
* ``simulation``: the hits of each policy at each size of the cache, and their upper bound
* ``plots``: draws plots
* ``report``: writes plots, tables and text to one HTML page
"""

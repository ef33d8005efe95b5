"""Estimates of what caching saves and costs, without a model or an engine.

Files in reading order:

* ``simulate/``: simulates policies, sizes and load, and draws the results
* ``size/``: bytes of KV, states and weights of a model
* ``log/``: reads logs of requests
* ``traces/``: traffic as tokens, block ids or recorded events
* ``replay/``: replays traffic through the real cache, request by request
* ``work/``: the time of a step, from measured costs or data sheets
* ``plan/``: the number of replicas, and their cache memory, for some traffic
* ``lint/``: finds what breaks prefixes, and what each fix saves

Rules:

1. Imports no engine, router or torch; the cache and the scheduler are the real ones.
2. A config that is not understood is refused, naming its key; nothing is guessed silently.
"""

"""The number of replicas, and their cache memory, for some traffic.

Files in reading order:

* ``replicas``: the hits of several replicas, each with a cache of its own
* ``plan``: the number of replicas, and their cache memory, for some traffic
* ``plan_words``: a plan's advice in words
"""

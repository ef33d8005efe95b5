"""Indexes, eviction policies, waiting orders and routing policies from a file of one's own.

``ostinato serve --index radix.py:Index`` names a class in place of a built-in index; so do
``--eviction-policy``, ``--order`` and, of the router, ``--policy``. A class implements the port
itself (``PrefixIndex``, ``EvictionPolicy``, ``WaitingOrder``), or the small port beside it, which
knows lists of numbers alone and imports nothing of Ostinato.

Files in reading order:

* ``loading``: ``FILE:Class`` and ``module:Class``
* ``prefix_map``: the small port of prefix indexes, driven over the whole port
* ``evictor``: the small port of eviction policies
* ``ranking``: the small port of waiting orders
* ``faults``: what happens where a plug-in raises or returns nonsense
* ``arrivals``: notes requests as they come, to be replayed under the built-in policies
* ``child``: runs what has to be checked in a process with limits
* ``plugged``: the factories that an engine passes to ``assembly``
* ``contracts``: what a plug-in has to pass before it serves
* ``explainer``: an explanation of one's own

Rules:

1. A plug-in is named by the one who starts the process: a setting, never a request or a trace.
2. What a plug-in returns is checked before it is used: a wrong answer of the small ports costs
   hits and never gives a wrong one (law 3).
3. A plug-in of the small ports that raises while it serves is called no more for that call, and the
   fault is logged once; the engine goes on.
4. Traces name no plug-in, so that a trace runs no code.
"""

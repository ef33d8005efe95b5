"""Which tokens may come next under a grammar.

Files in reading order:

* ``structured_outputs``: what a user sets per request
* ``grammar_vocabulary``, ``grammar_worker``, ``grammar_check``: compile a grammar within limits
* ``grammar``: which tokens may come next under a grammar
"""

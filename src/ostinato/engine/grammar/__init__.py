"""Which tokens may come next under a grammar.

Files in reading order:

* ``structured_outputs``: what a user sets per request
* ``grammar_vocabulary``, ``grammar_worker``, ``grammar_check``: compile a grammar within limits
* ``grammar_constraints``: which tokens may come next, within a request's budget of time
* ``thinking_budget``: a bound on reasoning
* ``grammar``: compiles grammars, and remembers them by tenant
"""

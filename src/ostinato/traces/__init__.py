"""Traces: what happened to an engine, recorded so that it can be replayed but not read.

Files in reading order:

* ``anonymizer``: pseudonyms of tokens and tenants
* ``format``: the lines of a trace
"""

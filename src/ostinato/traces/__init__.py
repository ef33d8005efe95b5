"""Traces: what happened to an engine, written down so that it can be replayed and not be read.

Files in reading order:

* ``anonymizer``: the names by which tokens and tenants are written down
* ``format``: the lines of a trace
"""

"""Finds what breaks prefixes, and what each fix saves.

Files in reading order:

* ``slots``: classifies what varies in a template: a time, an id, a counter, a name
* ``keys``: writes JSON with its keys in one order
* ``templates``: groups requests by template, and finds what varies in it
* ``rules``: writes rules of ``--stabilise`` for what varies in it
* ``rewrites``: rewrites of requests that a sender could make
* ``order``: finds shuffled tools, examples, documents and call ids
* ``history``: finds earlier turns that are resent changed, retokenized, or dropped
* ``remedies``: the list of fixes that a sender could apply
* ``replay``: replays a group of requests, and counts computed tokens
* ``breakpoints``: checks that ``cache_control`` keeps what requests share
* ``lint``: finds what breaks prefixes, and what each fix saves
"""

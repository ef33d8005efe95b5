"""Servers, browsers and attackers for tests.

Files:

* ``servers``: real servers in a thread, on a free port
* ``served_process``: ``ostinato serve`` as a process of its own
* ``store_servers``: servers of remote tiers: Valkey or Redis, S3, Azure
* ``memory_tier``: a tier in a dictionary, with faults on demand
* ``browsers``: a real browser, without a network
* ``soak_client``: many clients at once, in a process of its own
* ``prefix_probe``: an attacker who guesses another tenant's prompt, letter by letter
* ``memory_search``: finds what is left of a tenant in everything that an object reaches
"""

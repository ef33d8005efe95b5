"""Tenants: guaranteed blocks and quotas, leases, public prefixes, and cache administration.

Files in reading order:

* ``terms``: terms of leases, and receipts
* ``shares``: ``TenantShares``, the port ``BlockShares`` with an account per tenant
* ``lease_tree``: leased prefixes that are renewed by use, and when each was used last
* ``lease_book``: leases, by number and by time of expiry
* ``lease_limits``: how much leases may hold, and why no more
* ``cache_admin``: ``CacheAdmin``: leases, public prefixes, erasure, epochs, reset

Rules:

1. A tenant's guaranteed blocks are evicted for no other tenant.
2. What an erased tenant had is nowhere: blocks, leases, counts, kept events, history.
"""

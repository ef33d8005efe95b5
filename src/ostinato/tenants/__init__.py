"""Tenants: guaranteed blocks and quotas, leases, public prefixes, and cache administration.

Files in reading order:

* ``terms``: for how long a prefix is kept, and what was promised
* ``shares``: ``TenantShares``, the port ``BlockShares`` with an account per tenant
* ``lease_book``: leases, by number and by time of expiry
* ``lease_limits``: how much leases may hold, and why no more
* ``public_prefixes``: which prefixes are published, and who may continue them
* ``cache_admin``: ``CacheAdmin``: leases, publication, erasure, epochs, reset

Rules:

1. A tenant's guaranteed blocks are evicted for no other tenant.
2. What an erased tenant had is nowhere: blocks, leases, counts, kept events, history.
"""

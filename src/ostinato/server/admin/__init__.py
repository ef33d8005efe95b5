"""Routes under ``/admin``, for the administrator only.

Files in reading order:

* ``bodies``: request bodies
* ``statistics``: counters and contents of the cache
* ``leases``: leases, pins and public prefixes
* ``erase``: erases tenants
* ``kv_events``: endpoints of KV events, and snapshots of the cache
* ``recording``: records traffic without its content
* ``prewarming``: computes prefixes ahead of requests

Rules:

1. Every route requires an administrator.
2. A tenant is named by its name; its salt never leaves the server.
"""

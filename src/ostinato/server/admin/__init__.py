"""Routes under ``/admin``, for the administrator alone.

Files in reading order:

* ``bodies``: bodies of requests
* ``statistics``: counters and contents of the cache
* ``leases``: leases and pins of prefixes
* ``public_prefixes``: prefixes that tenants share
* ``erase``: erases tenants
* ``kv_events``: where KV events are published, and a snapshot of what is cached
* ``recording``: recordings of the traffic without its content
* ``prewarming``: computes prefixes before the first request

Rules:

1. Every route asks for an administrator.
2. A tenant is named by its name; its salt never leaves the server.
"""

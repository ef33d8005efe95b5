"""What may an operator do over HTTP? Routes under ``/admin``, for the administrator alone.

Files in reading order:

* ``bodies``: what may be asked?
* ``statistics``: what did the cache do, and what lies in it?
* ``leases``: what shall be in the cache, and stay there?
* ``public_prefixes``: what do tenants share?
* ``erase``: what shall be gone?
* ``kv_events``: where are events published, and what is cached now?
* ``recording``: what is written down of the traffic, without its content?
* ``prewarming``: what is computed before the first request?

Rules:

1. Every route asks for an administrator.
2. A tenant is named by its name; its salt never leaves the server.
"""

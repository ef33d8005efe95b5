"""Who calls: keys, tenants, limits of rate and of unread output.

Files in reading order:

* ``keys``: the keys file: API keys, quotas and limits of tenants
* ``callers``: authenticates callers, and holds their permissions
* ``rate_limit``: limits of requests and tokens per minute
* ``unread_output``: output that clients have not taken, bounded
* ``connections``: limits and closes connections
"""

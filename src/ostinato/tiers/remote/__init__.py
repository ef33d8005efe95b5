"""A tier on a server that several engines share.

Files in reading order:

* ``breaker``: deadlines of calls, and the circuit breaker
* ``valkey_store``: a server of the Redis protocol
* ``object_store``: S3, Google, Azure, a folder
* ``search``: finds and verifies a prefix on a server
* ``places``: keys of extents on a server, and those of a tenant
* ``tier``: ``RemoteTier``
* ``address``: opens the tier of a ``kv_remote``, also one of another package
"""

from ostinato.tiers.remote.tier import RemoteOptions, RemoteTier

__all__ = ["RemoteOptions", "RemoteTier"]

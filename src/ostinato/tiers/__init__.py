"""KV tiers: KV cache that outlives the pool, in host memory, on disk and on servers.

Files in reading order:

* ``retention``: what to keep when the tier is full
* ``prefix``: how KV is named, by all that its bytes depend on
* ``port``: ``KVTier``, its calls, and what they take and return
* ``record``: the format of an extent
* ``folder``: the system calls of the disk tier
* ``byte_store``: what the remote tier needs of a server
* ``tenant_keys``: wrapped keys of tenants
* ``sealing``: names of tenants, and encryption
* ``segments``: append-only files of records, and their recovery
* ``index``: finds the records that continue a prefix
* ``limits``: settings of a disk tier, and its daily budget
* ``segment_log``: appends, commits, and evicts segments
* ``disk_health``: read-only and off after faults
* ``disk``: ``DiskTier``
* ``host_memory``: ``MemoryFolder``, a disk tier's segments in memory, below the pool of a GPU
* ``breaker``: deadlines of calls, and the circuit breaker
* ``valkey_store``: a server of the Redis protocol
* ``object_store``: S3, Google, Azure, a folder
* ``remote_search``: finds and verifies a prefix on a server
* ``remote_places``: keys of extents on a server, and those of a tenant
* ``remote``: ``RemoteTier``
* ``remote_address``: opens the tier of a ``kv_remote``, also one of another package
* ``chain``: several tiers as one
* ``conformance``, ``simulated``: earlier names of modules of ``ostinato.testing``

Rules:

1. An extent is visible only after it is durable.
2. What is loaded is what was stored for these tokens, this tenant and this namespace, or nothing.
3. A fault of the medium is a result, never an exception, and never stops the engine.
4. A tier never occupies more bytes than its limit, not even after a crash.
5. No byte of what was erased is left.
"""

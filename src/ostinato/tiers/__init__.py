"""Tiers: KV that outlives the pool, in host memory, on disk and on servers.

Files in reading order:

* ``retention``: what is kept when there is no more room
* ``prefix``: how KV is named, by all that its bytes depend on
* ``port``: ``KVTier``, the four calls, and what they take and return
* ``record``: how an extent is laid out, checked and sealed
* ``sealing``: names and keys of tenants
* ``folder``: the system calls of the disk tier
* ``index``: which blocks of which records continue a prefix
* ``segments``: append-only files of records, and how they are read at start
* ``segment_log``: appends, commits and evicts segments
* ``disk``: ``DiskTier``
* ``host_memory``: ``MemoryFolder``, a disk tier's segments in memory, behind the pool of a device
* ``byte_store``: what the remote tier needs of a server
* ``breaker``: calls that end in time, and a server that fails is left alone
* ``valkey_store``: a server of the Redis protocol
* ``object_store``: S3, Google, Azure, a folder
* ``remote_search``: where a prefix continues on a server
* ``remote``: ``RemoteTier``
* ``remote_address``: the tier of a ``kv_remote``, also one of another package
* ``chain``: several tiers as one
* ``conformance_medium``: what the conformance suite stores, and the medium that it asks for
* ``conformance_faults``: damage of a medium, and a storm of all kinds
* ``conformance``: the suite that every tier passes
* ``simulated``: a disk that is killed, loses power, fails or is damaged, for tests

Rules:

1. An extent is visible only after it is durable.
2. What is loaded is what was stored for these tokens, this tenant and this namespace, or nothing.
3. A fault of the medium is a result, never an exception, and never stops the engine.
4. A tier never occupies more bytes than its limit, also after a crash.
5. What was erased is nowhere.
"""

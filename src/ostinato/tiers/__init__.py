"""KV tiers: KV cache that outlives the pool, in host memory, on disk and on servers.

Files in reading order:

* ``retention``: what to keep when the tier is full
* ``prefix``: how KV is named, by all that its bytes depend on
* ``port``: ``KVTier``, its calls, and what they take and return
* ``record``: the format of an extent
* ``folder``: the system calls of the disk tier
* ``byte_store``: what the remote tier needs of a server
* ``encryption/``: keys of tenants, and sealed records
* ``disk/``: segments on a disk or in host memory
* ``remote/``: a server of the Redis protocol, an object store
* ``chain``: several tiers as one
* ``conformance``, ``simulated``: earlier names of modules of ``ostinato.testing``

Rules:

1. An extent is visible only after it is durable.
2. What is loaded is what was stored for these tokens, this tenant and this namespace, or nothing.
3. A fault of the medium is a result, never an exception, and never stops the engine.
4. A tier never occupies more bytes than its limit, not even after a crash.
5. No byte of what was erased is left.
"""

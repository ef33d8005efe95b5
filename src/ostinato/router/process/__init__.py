"""The router process: many engines behind one address.

Files in reading order:

* ``config``: its settings
* ``routing_fields``: reads the part of a request's body that routing needs
* ``incremental_tokenizer``, ``tokenizer``, ``tokens``: tokenize prompts as the workers do
* ``kv_feed``: receives the KV events of workers, and recovers missing ones; Ray uses it too
* ``worker``, ``worker_pool``: the workers and their health
* ``decisions``: the latest routing decisions
* ``usage_sniffer``: reads usage and ids from responses as they pass
* ``admission``: limits concurrent requests and bytes
* ``public_prefixes``: prefixes that all tenants share
* ``headers``: headers that are forwarded, and that are set here
* ``proxy``: forwards requests to workers, and their responses
* ``metrics``, ``admin``: metrics and administration
* ``connections``: limits clients' connections
* ``app``, ``lifecycle``: the routes, start and shutdown
  (``static`` is the page)

Rules:

1. Bodies and responses are forwarded byte for byte.
2. A request is retried only while no byte of a response was sent.
3. When a client disconnects, its request is cancelled.
4. Only operators name workers; no address from a worker or client is connected to.
5. The event loop never waits for a tokenizer.
"""

"""The router as a process: many engines behind one address.

Files in reading order:

* ``config``: what may be set of it?
* ``prompts``: which part of a request's body decides where it goes?
* ``known_texts``, ``tokenizer``, ``tokens``: which tokens will the workers see?
* ``kv_feed``: which events did a worker publish, and what is fetched where some are missing?
* ``worker``, ``fleet``: which workers are there, and which of them are well?
* ``decisions``: which requests went where, and why?
* ``peek``: what does an answer say of itself?
* ``admission``: which requests are let in, and how much of a body?
* ``public_prefixes``: which prefixes do all tenants share, and where?
* ``headers``: which headers pass on, and which are set here?
* ``proxy``: which way does a request take, and its answer?
* ``metrics``, ``admin``: what may operators know and change?
* ``app``, ``lifecycle``: which routes are there, and how does the process begin and end?
  (``static`` is the page)

Rules:

1. Bodies and answers pass byte for byte.
2. A request is tried again only while no byte of an answer was sent.
3. A client that goes away takes its request along.
4. Workers are named by operators alone; nothing that a worker or a client says is connected to.
5. The event loop never waits for a tokenizer.
"""

"""The router as a process: many engines behind one address.

Files in reading order:

* ``config``: its settings
* ``prompts``: the part of a request's body that decides which worker gets it
* ``known_texts``, ``tokenizer``, ``tokens``: the tokens that the workers will see
* ``kv_feed``: the events that a worker published, and what is fetched where some are missing
* ``worker``, ``fleet``: the workers, and which of them are well
* ``decisions``: where requests went, and why
* ``peek``: what an answer says of itself
* ``admission``: limits the requests and the bytes of bodies that are let in
* ``public_prefixes``: the prefixes that all tenants share
* ``headers``: which headers are passed on, and which are set here
* ``proxy``: the way of a request to a worker, and of its answer
* ``metrics``, ``admin``: what operators may know and change
* ``app``, ``lifecycle``: the routes, and how the process starts and ends
  (``static`` is the page)

Rules:

1. Bodies and answers pass byte for byte.
2. A request is tried again only while no byte of an answer was sent.
3. A client that goes away takes its request along.
4. Workers are named by operators alone; nothing that a worker or a client says is connected to.
5. The event loop never waits for a tokenizer.
"""

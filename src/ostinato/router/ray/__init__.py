"""Ostinato on Ray Serve: engines as a deployment, and the router as its request router.

::

    from ray import serve
    from ostinato.router.ray import app
    serve.run(app({"model": "tiny-shakespeare", "num_replicas": 4}), blocking=True)

Files in reading order:

* ``call``: an HTTP request between the two deployments
* ``request_router``: chooses the replica of a call
* ``replica``: one engine
* ``ingress``: the routes for clients
* ``deployment``: both as an application

Rules:

1. All choices are made by ``ostinato.router``.
2. KV events go from replicas to request routers over ZeroMQ, never through Ray's controller.
3. A call that ends in any way is removed from its replica's load.
"""

from ostinato.router.ray.deployment import AppSettings, app
from ostinato.router.ray.request_router import PrefixRequestRouter

__all__ = ["AppSettings", "PrefixRequestRouter", "app"]

"""Our engine on Ray Serve, and our router as Ray Serve's request router.

::

    from ray import serve
    from ostinato.ray import app
    serve.run(app({"model": "tiny-shakespeare", "num_replicas": 4}), blocking=True)

Files in reading order:

* ``call``: one HTTP request between the two deployments
* ``request_router``: which replica gets a call
* ``replica``: one engine
* ``ingress``: what clients connect to
* ``deployment``: both of them as an application

Rules:

1. Choices are those of ``ostinato.router``: this room only joins Ray's replicas to it.
2. KV events go from replicas to request routers over ZeroMQ, never through Ray's controller.
3. A call that ends, however it does, is counted off its replica.
"""

from ostinato.ray.deployment import AppSettings, app
from ostinato.ray.request_router import PrefixRequestRouter

__all__ = ["AppSettings", "PrefixRequestRouter", "app"]

"""Both deployments as an application of Ray Serve.

::

    serve run ostinato.router.ray:app model=tiny-shakespeare num_replicas=4
"""

import warnings
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from ostinato.former_names import renamed
from ostinato.router.policy import POLICIES
from ostinato.router.ray.ingress import Ingress
from ostinato.router.ray.replica import EngineReplica
from ostinato.router.ray.request_router import PrefixRequestRouter


class AppSettings(BaseModel):
    """Settings of the application.

    Attributes:
        model: Name, folder, GGUF file or name on the hub, as ``ostinato serve`` takes it; each node
            needs it at the same path.
        num_replicas: Number of engines.
        max_replicas: If above ``num_replicas``, Ray adds and removes engines by their requests.
        target_requests: Requests per engine at which Ray adds and removes engines.
        max_requests: Maximum concurrent requests of an engine; Ray queues the rest.
        num_cpus: CPUs of each engine, for Ray's placement.
        num_gpus: GPUs of each engine.
        num_ingress: Processes that accept HTTP requests; each routes by its own requests and the
            events of all engines.
        policy: How engines are chosen, one of ``ostinato.router.policy.POLICIES``.
        keys_file: File of API keys, at the same path on each node; None admits all clients.
        engine: Settings of each engine, see ``EngineConfig``.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    num_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=0, ge=0)
    target_requests: float = Field(default=16.0, gt=0)
    max_requests: int = Field(default=256, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    num_ingress: int = Field(default=1, ge=1)
    policy: str = POLICIES[0]
    keys_file: str | None = None
    engine: dict[str, Any] = {}

    def scaling(self) -> dict[str, Any]:
        """Return the options of Ray Serve for the number of replicas."""
        if self.max_replicas <= self.num_replicas:
            return {"num_replicas": self.num_replicas}
        limits = {"min_replicas": self.num_replicas, "max_replicas": self.max_replicas}
        return {"autoscaling_config": {**limits, "target_ongoing_requests": self.target_requests}}


def app(settings: dict[str, Any]) -> Application:
    """Return the application, for ``serve.run`` and ``serve run``.

    Args:
        settings: Fields of ``AppSettings``.

    Raises:
        ValidationError: A setting is unknown or out of range.
    """
    if "keys" in settings:
        warnings.warn(renamed("keys", "keys_file"), DeprecationWarning, stacklevel=2)
        settings = {"keys_file": settings["keys"]} | settings
        del settings["keys"]
    given = AppSettings.model_validate(settings)
    router = RequestRouterConfig(
        request_router_class=PrefixRequestRouter,
        request_router_kwargs={"policy": given.policy},
        request_routing_stats_period_s=2.0,
    )
    engines = serve.deployment(EngineReplica).options(
        name="Engine",
        max_ongoing_requests=given.max_requests,
        ray_actor_options={"num_cpus": given.num_cpus, "num_gpus": given.num_gpus},
        request_router_config=router,
        **given.scaling(),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=given.num_ingress,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
    )
    handle = engines.bind(given.model, given.engine, given.keys_file)
    return ingress.bind(handle, given.model, given.keys_file)

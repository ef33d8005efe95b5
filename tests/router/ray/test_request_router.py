"""Ray's request router without a cluster: replicas that join, are chosen and die."""

import asyncio
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import Request

pytest.importorskip("ray", reason="needs ostinato[ray]")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from ray.exceptions import ActorDiedError
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID
    from ray.serve.request_router import ReplicaID

    from ostinato.router import RouteRequest
    from ostinato.router.ray.call import RayCall, ResponseHead
    from ostinato.router.ray.ingress import Ingress
    from ostinato.router.ray.request_router import PrefixRequestRouter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ENGINE = DeploymentID(name="Engine")
LONG = list(range(400))


def test_the_earlier_names_of_the_room_still_work():
    """Serve configs name ``ostinato.ray:app``; for one release both places are the same objects."""
    import ostinato.ray
    import ostinato.router.ray

    for name in ostinato.ray.__all__:
        assert getattr(ostinato.ray, name) is getattr(ostinato.router.ray, name)


@dataclass
class Replica:
    """As Ray wraps one."""

    replica_id: ReplicaID
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


@dataclass
class Pending:
    """A request on its way."""

    args: tuple[Any, ...]


def asked(*tail: int) -> Pending:
    return Pending((RayCall("POST", "/", [], b"", RouteRequest([*LONG, *tail])),))


async def test_calls_follow_their_prefix_until_its_replica_dies():
    router = PrefixRequestRouter(ENGINE, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    replicas = [Replica(ReplicaID(name, ENGINE)) for name in "abc"]
    router.update_replicas(replicas)
    first = asked(1)
    [[chosen], *_] = await router.choose_replicas(replicas, first)
    router.on_request_routed(first, chosen.replica_id, None)
    first.args[0].progress.first_token()
    first.args[0].progress.ended(0)
    await asyncio.sleep(0)
    for number in range(3):
        call = asked(2, number)
        ranks = await router.choose_replicas(replicas, call)
        assert ranks[0] == [chosen] and len(ranks) == 3
        assert call.args[0].progress.decision.expected_cached_tokens == 400
    router.on_replica_actor_died(chosen.replica_id)
    ranks = await router.choose_replicas(replicas, asked(3))
    assert [chosen] not in ranks and len(ranks) == 2
    left = [each for each in replicas if each is not chosen]
    router.update_replicas([*left, Replica(ReplicaID("d", ENGINE))])
    assert len(await router.choose_replicas(router._replicas_list, asked(4))) == 3
    router.library.check()


async def test_a_call_that_ray_sends_elsewhere_counts_there_and_one_that_ended_nowhere():
    router = PrefixRequestRouter(ENGINE, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    replicas = [Replica(ReplicaID(name, ENGINE)) for name in "ab"]
    router.update_replicas(replicas)
    call = asked(1)
    [[_], [other]] = await router.choose_replicas(replicas, call)
    router.on_request_routed(call, other.replica_id, None)
    running = {each.name: each.num_requests for each in router.library.workers()}
    assert running.pop(other.replica_id.unique_id) == 1 and not any(running.values())
    call.args[0].progress.ended()
    cancelled = asked(2)
    cancelled.args[0].progress.ended()
    await router.choose_replicas(replicas, cancelled)
    await asyncio.sleep(0)
    assert not any(each.num_requests for each in router.library.workers())
    assert pickle.loads(pickle.dumps(call.args[0])).progress.decision is None


MODELS = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}


async def nothing() -> dict[str, Any]:
    """Receive the body of a request that has none."""
    return {"type": "http.request", "body": b""}


class Handle:
    """Of a deployment, some of whose replicas die before they answer."""

    def __init__(self, num_lost: int) -> None:
        self.num_lost, self.calls = num_lost, list[RayCall]()
        self.respond = self

    def options(self, stream: bool) -> "Handle":
        return self

    def remote(self, call: RayCall) -> "Handle":
        self.calls.append(call)
        return self

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> ResponseHead:
        if len(self.calls) <= self.num_lost:
            raise ActorDiedError
        return ResponseHead(200, [])


@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_call_whose_replica_dies_before_its_answer_is_tried_elsewhere(num_lost):
    """At three replicas in all; each attempt counts as failed where it was."""
    handle = Handle(num_lost)
    ingress = Ingress(handle, "tiny-shakespeare", None)
    answer = asyncio.run(ingress(Request(MODELS, nothing)))
    assert answer.status_code == (200 if num_lost < 3 else 503)
    assert num_lost < 3 or b"try again soon" in answer.body
    assert len(handle.calls) == 3
    assert len({id(call.progress) for call in handle.calls}) == 3


async def test_prompts_of_other_deployments_are_found_in_their_arguments():
    router = PrefixRequestRouter(ENGINE, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    replicas = [Replica(ReplicaID(name, ENGINE)) for name in "ab"]
    router.update_replicas(replicas)
    body = {"messages": [{"role": "user", "content": "To be, or not to be. " * 20}]}
    assert len(await router.choose_replicas(replicas, Pending((body,)))) == 2
    assert await router.choose_replicas(replicas, Pending((7,))) == [replicas]
    assert await router.choose_replicas(replicas, None) == [replicas]

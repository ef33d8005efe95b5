"""Our engine on Ray Serve: two nodes, simulated by two raylets on this machine.

Nightly, and only where ``ostinato[ray]`` is installed: ``pytest -m nightly tests/router/ray``.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.waiting import wait_until

ray = pytest.importorskip("ray", reason="needs ostinato[ray]")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    # Ray leaves its pipes and sockets to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "tiny-shakespeare"
SCENE = "Act 1. Scene 2. A public place. Enter several citizens, with staves and clubs. " * 4


class Served:
    """An application that runs, and a client of it."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def ask(self, prompt: str, max_tokens: int = 4) -> tuple[str, str, int]:
        """Return which replica answered, how its cache is known, and what it found cached."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        headers = answer.headers
        return headers["x-ostinato-worker"], headers["x-ostinato-worker-state"], cached


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve one engine, or two under load, on two nodes with room for one each."""
    from ray import serve
    from ray.cluster_utils import Cluster

    from ostinato.router.ray import app

    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_health_check_failure_threshold": "30"}
    # On a busy machine Ray's proxy is late to answer, and must not be replaced for that.
    for check in ("HEALTH", "READY"):
        os.environ[f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S"] = "120"
    node: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    settings = {"model": MODEL, "max_replicas": 2, "target_requests": 1.0}
    serve.run(app({**settings, "engine": {"num_blocks": 256, "block_size": 16}}))
    with httpx.Client(base_url="http://127.0.0.1:8000", timeout=120) as client:
        yield Served(client)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def test_a_prefix_is_found_where_it_is_and_its_replica_is_exact(served: Served):
    worker, _, _ = served.ask(SCENE)
    wait_until(lambda: served.ask(SCENE + "ROMEO")[1] == "exact")
    again, _, cached = served.ask(SCENE + "JULIET")
    assert again == worker and cached >= 256


def test_streams_pass_and_no_route_leads_to_the_administration(served: Served):
    body = {"model": MODEL, "max_tokens": 8, "stream": True}
    chat = {**body, "messages": [{"role": "user", "content": "Speak."}]}
    with served.client.stream("POST", "/v1/chat/completions", json=chat) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 4 and lines[-1] == "data: [DONE]"
    assert served.client.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert served.client.get("/admin/kv/snapshot").status_code == 404


def test_load_adds_a_replica_on_the_other_node_and_one_that_dies_is_replaced(served: Served):
    """What was cached on the replica that died is expected nowhere."""
    seen: set[str] = set()
    is_over = threading.Event()

    def load(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            turn += 1
            seen.add(served.ask(f"{number} {turn}: {SCENE}", 48)[0])

    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(1200):
        if len(seen) == 2 or is_over.wait(0.2):
            break
    is_over.set()
    for thread in threads:
        thread.join()
    assert len(seen) == 2, "Ray added no replica"
    lost = served.ask(SCENE)[0]
    [name] = [n for n in ray.util.list_named_actors(all_namespaces=True) if lost in n["name"]]
    ray.kill(ray.get_actor(**name))
    workers = {served.ask(f"{SCENE} {number}")[0] for number in range(8)}
    assert workers and lost not in workers

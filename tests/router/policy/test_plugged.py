"""A routing policy of one's own: checked, asked, and compared with the default."""

from pathlib import Path

import pytest

from ostinato.core.errors import ConfigError
from ostinato.labs.course import lab_of
from ostinato.router.policy import Router, RouterConfig, RouteRequest
from ostinato.router.policy.plugged import PluggedPolicy, failure_of


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes the solution of lab 7 with a change, and names its class."""

    def write(old: str = "", new: str = "") -> str:
        text = lab_of(7).solution
        assert old in text
        path = tmp_path / "router.py"
        path.write_text(text.replace(old, new) if old else text)
        return f"{path}:Policy"

    return write


def test_the_solution_of_the_lab_passes_the_contract(write):
    assert failure_of(write()) == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("        return min(\n", "        return 7 + min(\n", "returns 7 for 1 workers"),
        ("        return min(\n", "        return 'w' or min(\n", "returns 'w'"),
        ("        return min(\n", "        return 1 / 0 or min(\n", "ZeroDivisionError"),
        ("places = range(len(workers))", "places = range(len(workers))\n"
         "        workers[0].queued += 1", ""),
    ],
)  # fmt: skip
def test_a_broken_policy_is_refused_with_the_workers_that_it_was_shown(
    old: str, new: str, words: str, write
):
    """What it does to its views changes nothing: they are made anew for each choice."""
    failure = failure_of(write(old, new))
    assert words in failure and bool(failure) == bool(words)


def test_a_policy_routes_and_is_compared_with_the_default(write):
    """The second of two equal prompts goes where the first was computed, under both."""
    router = Router(RouterConfig(policy=write()))
    for name in ("one", "two"):
        router.add_worker(name)
    request = RouteRequest(list(range(64)))
    first = router.route(request, 0.0)
    router.first_token(first)
    second = router.route(request, 2.0)
    assert first.worker == second.worker
    assert f"{second.worker}: 63 of 64 tokens cached, 1 to compute" in second.explain()
    assert isinstance(router.policy, PluggedPolicy)
    both = router.policy.beside_built_in()
    assert (both["requests"], both["faults"]) == (2, 0)
    assert both["own_ratio"] == both["built_in_ratio"] > 0.4


def test_a_policy_that_fails_later_is_answered_for(write, tmp_path: Path):
    """The least loaded worker gets the request, and the fault is counted."""
    policy = PluggedPolicy(write("        return min(\n", "        return None and min(\n"))
    router = Router(RouterConfig())
    router.add_worker("one")
    router.policy = policy
    assert router.route(RouteRequest([1, 2, 3]), 0.0) is not None
    assert policy.faults.num_faults == 1


def test_a_policy_that_cannot_be_loaded_is_refused(write):
    with pytest.raises(ConfigError, match="there is no file"):
        Router(RouterConfig(policy="nowhere.py:Policy"))
    with pytest.raises(ConfigError, match=r"or a class as FILE\.py:Class"):
        RouterConfig(policy="nearest")

"""A server with classes of one's own: their hits beside the built-in ones, and their reasons."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.cli.demonstration.lab_traffic import hits, prompts, send
from ostinato.core.errors import ConfigError
from ostinato.labs.course import lab_of
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.servers import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the solutions of labs 2, 5 and 8."""
    folder = tmp_path_factory.mktemp("labs")
    for number in (2, 5, 8):
        lab = lab_of(number)
        (folder / f"{lab.name}.py").write_text(lab.solution)
    return folder


@pytest.fixture(scope="module")
def plugged_state(folder: Path) -> Iterator[ServerState]:
    """Serve the bundled model under them."""
    llm = AsyncLLM(
        "tiny-shakespeare", dtype="float32", num_blocks=256, index=f"{folder}/radix.py:Index",
        order=f"{folder}/step.py:Ranking",
    )  # fmt: skip
    yield ServerState(llm, ServerConfig(explainer=f"{folder}/explain.py:explain"))
    llm.shutdown()


@pytest.fixture(scope="module")
def plugged_url(plugged_state: ServerState) -> Iterator[str]:
    with serving(plugged_state) as url:
        yield url


@pytest.fixture(scope="module")
def served(plugged_url: str) -> str:
    """Send the demo's calls: 512 shared tokens and 16 of their own."""
    send(plugged_url, prompts(6, 1), 3, lambda done: None)
    return plugged_url


def test_the_page_has_the_hits_of_both(served: str):
    """Whole blocks with the lab's tree; single tokens more with Ostinato's own."""
    both = hits(served)
    assert both is not None
    assert both["requests"] == 6 and both["faults"] == 0
    assert both["names"] == ["radix.py:Index", "step.py:Ranking"]
    assert both["own_ratio"] == pytest.approx(5 * 512 / (6 * 528))
    assert both["own_ratio"] < both["built_in_ratio"] < 1


def test_an_explanation_has_the_spans_of_both(served: str):
    """Those of one's own sum to the prompt as well."""
    with httpx.Client(base_url=served, timeout=60) as client:
        body = {"model": "tiny-shakespeare", "prompt": "Enter a ghost.", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body).json()
        told = client.get(f"/v1/explain/{answer['id']}").json()
    own = told["own"]
    assert own["error"] == "" and own["name"] == "explain.py:explain"
    assert sum(span["stop"] - span["start"] for span in own["spans"]) == told["num_tokens"]
    assert own["spans"][-1]["reason"] == "never seen"


def test_a_plugged_engine_records_no_trace(plugged_state: ServerState, tmp_path: Path):
    """A trace would be replayed under other code."""
    with pytest.raises(ConfigError, match="cannot be replayed under code"):
        asyncio.run(plugged_state.llm.start_recording(tmp_path / "trace.jsonl"))


def test_a_server_without_plug_ins_has_nothing_to_compare(http: httpx.Client):
    assert http.get("/ui/state").json()["plugged"] is None
    answer = http.post("/v1/completions", json={"model": "bard", "prompt": "So.", "max_tokens": 1})
    assert "own" not in http.get(f"/v1/explain/{answer.json()['id']}").json()

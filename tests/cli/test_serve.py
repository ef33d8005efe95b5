"""`ostinato serve`: how it begins, and how it ends."""

import json
import signal
import socket
from pathlib import Path
from unittest import mock

import httpx
import openai

from ostinato.runner.checkpoints.model_resolver import resolve_model
from ostinato.server.state import ServerState
from tests.cli.terminal import Terminal
from tests.support.models.adapters import save_adapter
from tests.support.servers.served_process import served
from tests.support.servers.servers import events_of, serving
from tests.support.waiting import wait_until

MODEL = "tiny-shakespeare"


def test_it_serves_this_machine_alone_drains_when_it_is_told_to_end_and_hits_after_a_restart(
    tmp_path: Path, terminal: Terminal
):
    """After SIGTERM: not ready, nothing new, what runs goes on to its end, exit code 0.

    The next server, in this process, finds on the disk what the first has computed.
    """
    adapter = save_adapter(resolve_model(MODEL), tmp_path / "sql", 1)
    options = ["--lora-modules", f"sql={adapter}", "--num-blocks", "256"]
    options += ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", "64MiB"]
    with served(MODEL, *options) as server, httpx.Client(base_url=server.url) as http:
        assert server.url.startswith("http://127.0.0.1:")
        wait_until(lambda: "no keys: only this machine" in "".join(server.lines))
        assert "Computing in bfloat16 on cpu, instruction set" in "".join(server.lines)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            assert [card.id for card in client.models.list()] == [MODEL, "sql"]
            answer = client.completions.create(model="sql", prompt="To be", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        text, details = continued(http)
        assert details == {"cached_tokens": 0}

        call = {"model": MODEL, "prompt": "To be", "ignore_eos": True, "max_tokens": 300}
        options_of_stream = {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/completions", json=call | options_of_stream) as response:
            events = events_of(response)
            next(events)
            server.signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            refused = httpx.post(f"{server.url}/v1/completions", json=call)
            *_, usage, done = events
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "shutting_down"
        assert json.loads(usage)["usage"]["completion_tokens"] == 300
        assert done == "[DONE]"
        assert server.wait() == 0
        assert "leaked" not in "".join(server.lines), "extensions count what is frozen"

    def hit(state: ServerState, *_: object) -> None:
        with serving(state) as url, httpx.Client(base_url=url) as http:
            assert continued(http) == (text, {"cached_tokens": 96, "disk_tokens": 96})
            tiers = http.get("/admin/tiers").json()
            assert tiers["loaded_tokens"] == {"disk": 96} and tiers["tiers"][0]["state"] == "on"
            metrics = http.get("/metrics").text
            assert 'ostinato_tier_loaded_tokens_total{tier="disk"} 96.0' in metrics
        state.llm.shutdown()

    with mock.patch("ostinato.server.lifecycle.run_server", side_effect=hit):
        ended = terminal.run("serve", MODEL, *options, "--port", "0")
    assert ended.exit_code == 0, ended.output


def continued(http: httpx.Client) -> tuple[str, dict[str, int]]:
    """Return how a prompt of 112 letters goes on, and where its tokens came from."""
    call = {"model": MODEL, "prompt": "To be, or not " * 8, "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=call).json()
    details = answer["usage"]["prompt_tokens_details"]
    details.pop("cache_write_tokens", None)  # what is published depends on what was loaded
    return answer["choices"][0]["text"], details


def test_another_host_is_refused_without_keys(terminal: Terminal):
    line = terminal.refuse("serve", "--host", "0.0.0.0")

    assert "host='0.0.0.0' can be reached from other machines" in line


def test_an_address_in_use_is_refused_before_a_model_is_loaded(terminal: Terminal):
    """The model does not exist, and that is not what is complained about."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = terminal.refuse("serve", "no-such-model", "--port", str(port))

    assert f"port={port}: cannot listen there" in line
    assert "--port 0" in line


def answer_bard(state: ServerState, *_: object) -> None:
    """Ask a server for its models, without its key and with it."""
    with serving(state) as url, httpx.Client(base_url=url) as http:
        assert http.get("/v1/models").status_code == 401
        answer = http.get("/v1/models", headers={"authorization": "Bearer sesame"})
        assert [card["id"] for card in answer.json()["data"]] == ["bard"]
    state.llm.shutdown()


def test_vllms_options_name_the_model_and_its_one_key(terminal: Terminal):
    """``--gpu-memory-utilization`` means nothing on a CPU, but must be a share."""
    options = ["--served-model-name", "bard", "--api-key", "sesame", "--num-blocks", "16"]
    options += ["--gpu-memory-utilization", "0.9", "--port", "0"]
    with mock.patch("ostinato.server.lifecycle.run_server", side_effect=answer_bard):
        done = terminal.run("serve", MODEL, *options)
    assert done.exit_code == 0, done.output
    assert "--api-key" in terminal.refuse("serve", "--api-key", "a", "--keys-file", "keys.json")
    refused = terminal.refuse("serve", "--gpu-memory-utilization", "90", "--port", "0")
    assert "gpu_memory_utilization=90.0: must be a share above 0 and up to 1" in refused

"""`ostinato serve`: how it begins, and how it ends."""

import json
import signal
import socket
from pathlib import Path

import httpx
import openai

from ostinato.runner.model_resolver import resolve_model
from tests.support.adapters import save_adapter
from tests.support.served_process import served
from tests.support.servers import events_of
from tests.support.waiting import wait_until

from .terminal import Terminal

MODEL = "tiny-shakespeare"


def test_it_serves_this_machine_alone_and_drains_when_it_is_told_to_end(tmp_path: Path):
    """After SIGTERM: not ready, nothing new, what runs goes on to its end, exit code 0."""
    adapter = save_adapter(resolve_model(MODEL), tmp_path / "sql", 1)
    named = ("--lora-modules", f"sql={adapter}")
    with served(MODEL, *named) as server, httpx.Client(base_url=server.url) as http:
        assert server.url.startswith("http://127.0.0.1:")
        wait_until(lambda: "no keys: only this machine" in "".join(server.lines))
        assert "Computing in bfloat16 on cpu, instruction set" in "".join(server.lines)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            assert [card.id for card in client.models.list()] == [MODEL, "sql"]
            answer = client.completions.create(model="sql", prompt="To be", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3

        call = {"model": MODEL, "prompt": "To be", "ignore_eos": True, "max_tokens": 300}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/completions", json=call | options) as response:
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


def test_a_wrong_setting_of_the_engine_is_refused_by_name(terminal: Terminal):
    assert "order='best'" in terminal.refuse("serve", "--order", "best", "--port", "0")


def test_a_conversation_hits_after_a_restart(tmp_path: Path):
    """Serve with a disk, SIGTERM, serve again: the first request finds its prefix on the disk."""
    options = ("--num-blocks", "64", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", "64MiB")
    call = {"model": MODEL, "prompt": "To be, or not " * 8, "max_tokens": 4, "temperature": 0}
    texts, details = [], []
    for _ in range(2):
        with served(MODEL, *options) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=call).json()
            texts.append(answer["choices"][0]["text"])
            details.append(answer["usage"]["prompt_tokens_details"])
            tiers = httpx.get(f"{server.url}/admin/tiers").json()
            metrics = httpx.get(f"{server.url}/metrics").text
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 96, "disk_tokens": 96}]
    assert texts[0] == texts[1]
    assert tiers["loaded_tokens"] == {"disk": 96} and tiers["tiers"][0]["state"] == "on"
    assert 'ostinato_tier_loaded_tokens_total{tier="disk"} 96.0' in metrics

"""Adapters over HTTP: a model name of their own, loaded by the administrator alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from ostinato.runner.checkpoints.model_resolver import resolve_model
from tests.server.keyed import MODEL, Keyed, keyed_server
from tests.support.models.adapters import INVOCATION, save_adapter
from tests.support.servers.servers import await_idle
from tests.support.waiting import wait_until

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters that may be loaded, links to one outside, and some not served."""
    folder, base = tmp_path_factory.mktemp("adapters") / "allowed", resolve_model(MODEL)
    save_adapter(base, folder / "sql", 1, target_modules=TARGETS)
    save_adapter(base, folder / "other", 2, target_modules=TARGETS)
    for seed in range(3):
        folder_of_judge, tokens = folder / f"judge-{seed}", {"alora_invocation_tokens": INVOCATION}
        save_adapter(base, folder_of_judge, seed, target_modules=TARGETS, **tokens)
    save_adapter(base, folder / "dora", 1, target_modules=TARGETS, use_dora=True)
    save_adapter(base, folder.parent / "elsewhere", 1, target_modules=TARGETS)
    (folder / "link").symlink_to(folder.parent / "elsewhere")
    (folder / "inner").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "inner" / name).symlink_to(folder.parent / "elsewhere" / name)
    weights = save_adapter(base, folder / "foreign", 1) / "adapter_model.safetensors"
    save_file({"base_model.model.model.layers.99.mlp.up_proj.lora_A.weight": np.ones(1)}, weights)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, allowed: Path) -> Iterator[Keyed]:
    settings = {"lora_folders": (str(allowed),)}
    with keyed_server(tmp_path_factory.mktemp("keys"), server=settings, enable_lora=True) as keyed:
        yield keyed


def load(server: Keyed, name: str, path: Path, tenant: str = "ops") -> tuple[int, str]:
    """Load an adapter; returns the status and the error's code."""
    body = {"lora_name": name, "lora_path": str(path)}
    answer = server.ask(tenant, "/v1/load_lora_adapter", body)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def test_an_adapter_is_a_model_for_the_official_clients(server: Keyed, allowed: Path):
    """Listed, asked through both APIs, shown on the page, unloaded, and gone."""
    assert load(server, "sql", allowed / "sql") == (200, "")
    key = server.keys["ann"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    with client, anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as other:
        cards = {card.id: card for card in client.models.list()}
        assert cards["sql"].model_dump()["parent"] == MODEL

        def said(model: str) -> tuple[str, int]:
            answer = client.completions.create(
                model=model, prompt="ROMEO: " * 20, max_tokens=8, temperature=0
            )
            assert answer.model == model and answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            return answer.choices[0].text, details.cached_tokens or 0

        base, adapted = said(MODEL), said("sql")
        assert (base[1], adapted[1]) == (0, 0) and base[0] != adapted[0]
        assert said("sql")[1] > 16 and said(MODEL) == (base[0], said(MODEL)[1])
        message = other.messages.create(
            model="sql", max_tokens=1, messages=[{"role": "user", "content": "Who?"}]
        )
        assert message.model == "sql"
        page = server.ask("ann", "/ui/state", method="GET").json()
        assert [row["adapter"] for row in page["requests"]][-2:] == ["sql", ""]

        body = {"lora_name": "sql"}
        assert server.ask("ops", "/v1/unload_lora_adapter", body).status_code == 200
        assert server.ask("ops", "/v1/unload_lora_adapter", body).status_code == 404
        with pytest.raises(openai.NotFoundError, match="model='sql'"):
            said("sql")
        assert said(MODEL)[0] == base[0]


@pytest.mark.parametrize(
    ("name", "place", "tenant", "wanted"),
    [
        ("sql", "sql", "ann", (403, "not_an_administrator")),
        ("far", "../elsewhere", "ops", (403, "path_not_allowed")),
        ("link", "link", "ops", (403, "path_not_allowed")),
        ("inner", "inner", "ops", (403, "path_not_allowed")),
        ("dora", "dora", "ops", (400, "invalid_value")),
        ("foreign", "foreign", "ops", (400, "invalid_value")),
        ("none", "none", "ops", (400, "invalid_value")),
        (MODEL, "sql", "ops", (400, "")),
    ],
)
def test_who_may_not_load_what_is_told_so(
    server: Keyed, allowed: Path, name: str, place: str, tenant: str, wanted: tuple[int, str]
):
    status, code = load(server, name, allowed / place, tenant)
    assert (status, code or "") == wanted
    assert not server.state.llm.engine.adapters.by_name


def test_requests_finish_with_the_adapter_that_they_began_with(server: Keyed, allowed: Path):
    """One streams when its adapter gets other content, and one when that is unloaded."""
    assert load(server, "sql", allowed / "sql") == (200, "")
    call: dict[str, Any] = {"model": "sql", "prompt": "JULIET: " * 9, "max_tokens": 150}
    call |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
    key = server.keys["ann"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:

        def said() -> tuple[str, int]:
            answer = client.completions.create(**call)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            details = answer.usage.prompt_tokens_details
            return answer.choices[0].text, details.cached_tokens or 0

        old = said()[0]
        running = client.completions.create(**call, stream=True)
        begun = next(running).choices[0].text
        assert load(server, "sql", allowed / "other") == (200, "")
        new, num_cached = said()
        assert new != old and num_cached == 0
        assert begun + "".join(chunk.choices[0].text for chunk in running) == old

        running = client.completions.create(**call, stream=True)
        begun = next(running).choices[0].text
        assert server.ask("ops", "/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
        with pytest.raises(openai.NotFoundError, match="model='sql'"):
            said()
        assert begun + "".join(chunk.choices[0].text for chunk in running) == new
    await_idle(server.state.llm)
    wait_until(lambda: not server.state.llm.engine.runner.adapters)


def test_a_storm_of_loads_and_unloads_harms_nothing_else(server: Keyed, allowed: Path):
    """Four callers load, ask and unload two names; meanwhile a fifth asks the base model."""
    plain = server.complete("bob", "To be", 8)["choices"][0]["text"]

    def storm(caller: int) -> set[int]:
        name, seen = f"name-{caller % 2}", set()
        for turn in range(5):
            body = {"lora_name": name, "lora_path": str(allowed / ("sql", "other")[turn % 2])}
            seen.add(server.ask("ops", "/v1/load_lora_adapter", body).status_code)
            call = {"model": name, "prompt": "To be", "max_tokens": 4}
            seen.add(server.ask("ann", "/v1/completions", call).status_code)
            body = {"lora_name": name}
            seen.add(server.ask("ops", "/v1/unload_lora_adapter", body).status_code)
        return seen

    with ThreadPoolExecutor(4) as pool:
        storms = [pool.submit(storm, caller) for caller in range(4)]
        while not all(it.done() for it in storms):
            assert server.complete("bob", "To be", 8)["choices"][0]["text"] == plain
        assert set().union(*(it.result() for it in storms)) <= {200, 400, 404}
    for name in list(server.state.llm.engine.adapters.by_name):
        server.administer("/v1/unload_lora_adapter", {"lora_name": name})
    await_idle(server.state.llm)
    assert not server.state.llm.engine.runner.adapters


def test_specialists_over_one_context_compute_it_once(server: Keyed, allowed: Path):
    """Activated adapters find what another one, and the base model, computed before."""
    context = [20 + i * 37 % 41 for i in range(1000)]
    for number in range(3):
        name = f"judge-{number}"
        assert load(server, name, allowed / name) == (200, "")
        found = server.num_cached("ann", [*context, *INVOCATION, *context[:15]], model=name)
        assert found == (1000 if number else 0)
    assert server.num_cached("ann", context) == 999
    for number in range(3):
        server.administer("/v1/unload_lora_adapter", {"lora_name": f"judge-{number}"})


def test_what_is_no_path_is_refused(server: Keyed):
    assert load(server, "sql", Path("\0")) == (400, "invalid_value")

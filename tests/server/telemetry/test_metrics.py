"""What Prometheus is told: names by its conventions, and numbers that add up to known traffic."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import ostinato.server
from ostinato import AsyncLLM, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.server.access.callers import ANONYMOUS, Caller
from ostinato.server.call import GenerateCall, sender
from ostinato.server.config import ServerConfig
from ostinato.server.errors import ApiError
from ostinato.server.routes.metrics import hit_share_label
from ostinato.server.serving import serve
from ostinato.server.state import ServerState
from ostinato.server.telemetry.engine_figures import FIGURES
from ostinato.server.telemetry.request_figures import FIGURES as REQUEST_FIGURES
from tests.support.servers.prefix_probe import ENDPOINTS, GENERATING
from tests.support.servers.servers import await_idle, serving
from tests.support.waiting import held_up, queued_commands, until

ANN = Caller(tenant="ann", salt="salt of ann")
BOB = Caller(tenant="bob", salt="salt of bob")


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """Load an engine of few blocks, so that something is evicted."""
    sizes = {"num_blocks": 24, "block_size": 4, "ghost_blocks": 24, "ghost_share": 1.0}
    engine = AsyncLLM("tiny-shakespeare", dtype="float32", **sizes)
    yield engine
    await_idle(engine)
    engine.shutdown()


@pytest.fixture
def server(llm) -> Iterator[tuple[ServerState, str]]:
    """Serve without keys; returns the server's state and address."""
    state = ServerState(llm, ServerConfig())
    with serving(state) as url:
        yield state, url


class Scrape:
    """One page, by the name of a sample and its labels."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Sum up all samples of a name that carry these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if sample.name == name}


def scrape(url: str) -> Scrape:
    answer = httpx.get(f"{url}/metrics", timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


async def ask(state: ServerState, caller: Caller, text: str, tokens: int = 2, **how) -> None:
    """Have a prompt continued through the one path of all completions."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    call = GenerateCall(endpoint="/test", params=params, prompt=sender(caller, text=text), **how)
    async for _ in serve(state, caller, call):
        pass


async def go_round(state: ServerState) -> None:
    """Have seven prompts come again and again, and replay what the ghost sampled of them."""

    def catch_up(engine: Engine) -> None:
        assert engine.cache.ghost is not None
        engine.cache.ghost.catch_up()

    for number in range(140):
        await ask(state, ANN, f"{'abcdefg'[number % 7]} of seven", tokens=1)
    await state.llm.look(catch_up)


async def at_once(state: ServerState, *texts: str) -> None:
    """Hold the engine up until all of Ann's prompts have come, so that they share a step."""
    held, goes_on = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        held.set()
        goes_on.wait(30)

    holding = asyncio.create_task(state.llm.look(hold))
    await asyncio.to_thread(held.wait, 30)
    with queued_commands() as commands:
        asking = [asyncio.create_task(ask(state, ANN, text)) for text in texts]
        await until(lambda: len(commands) >= len(texts))
    goes_on.set()
    await asyncio.gather(holding, *asking)


async def known_traffic(state: ServerState) -> None:
    """Sixteen letters that Ann asks three times, two of them at once, and Bob once."""
    await ask(state, ANN, "abcdefghijklmnop")
    await ask(state, ANN, "abcdefghijklxyz!")
    await at_once(state, *("ABCDEFGHIJKLMNO" + end for end in "12"))
    await ask(state, BOB, "abcdefghijklmnop")


def test_how_steps_are_computed_is_information_that_never_changes(llm, server):
    page = scrape(server[1])
    path = llm.engine.compute_path
    assert page.value("ostinato_compute_path_info", **path.fields()) == 1
    assert page.labels("ostinato_compute_path_info", "dtype") == {"float32"}


def test_prompt_tokens_by_origin_add_up_to_known_traffic(server):
    """Of 80: 12 cached, 12 waited for and 3 copied (MNO); Bob finds nothing of Ann's."""
    state, url = server
    before = scrape(url)
    asyncio.run(known_traffic(state))
    after = scrape(url)

    def brought(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    origins = {
        origin: brought("ostinato_prompt_tokens_total", origin=origin)
        for origin in ("computed", "cached", "copied", "waited")
    }
    assert origins == {"computed": 53, "cached": 12, "copied": 3, "waited": 12}
    assert brought("ostinato_tenant_prompt_tokens_total", tenant="tenant-1", result="hit") == 27
    assert brought("ostinato_tenant_prompt_tokens_total", tenant="tenant-2", result="hit") == 0
    assert brought("ostinato_tenant_prompt_tokens_total", tenant="tenant-2", result="miss") == 16
    assert brought("ostinato_looked_up_tokens_total", request="new", result="hit") == 27
    assert brought("ostinato_requests_total", finish_reason="length") == 5
    assert brought("ostinato_generated_tokens_total") == 10
    # A reader who comes late takes two tokens at once, and sees no gap between them.
    assert 0 < brought("ostinato_inter_token_latency_seconds_count") <= 5
    assert brought("ostinato_time_to_first_token_seconds_count") == 5
    assert brought("ostinato_time_to_first_token_seconds_count", hit_share="half_or_more") == 1
    assert after.value("ostinato_running_sequences") == 0
    assert after.value("ostinato_blocks") == 24


def test_what_other_sizes_and_policies_would_find_is_a_gauge_each(llm, server):
    """Three sizes, and LRU at this size; administrators see the same."""
    state, url = server
    asyncio.run(go_round(state))
    await_idle(state.llm)  # an idle engine counts nothing between two looks
    page, stats = scrape(url), httpx.get(f"{url}/admin/stats").json()
    ghosts = llm.cache_stats.ghosts
    assert {ghost.memory for ghost in ghosts if ghost.policy == "reuse_hazard"} == {0.5, 2.0, 4.0}
    assert len(ghosts) == 4
    for ghost, row in zip(ghosts, stats["ghosts"], strict=True):
        labels = {"memory": f"{ghost.memory:g}", "policy": ghost.policy}
        assert page.value("ostinato_ghost_hit_ratio", **labels) == ghost.hit_ratio
        assert page.value("ostinato_ghost_sampled_blocks", **labels) == ghost.num_sampled > 50
        assert page.value("ostinato_ghost_requests", **labels) == ghost.num_requests >= 70
        ends = [
            page.value("ostinato_ghost_interval_hit_ratio", end=end, **labels)
            for end in ("low", "high")
        ]
        assert ends == [ghost.low, ghost.high] and ghost.low <= ghost.hit_ratio <= ghost.high
        assert row["hit_ratio"] == pytest.approx(ghost.hit_ratio, abs=1e-6)
        assert [row["low"], row["high"]] == pytest.approx(ends, abs=1e-6)
        assert row["num_requests"] == ghost.num_requests
        later = page.value("ostinato_ghost_later_requests", **labels)
        assert later == row["num_later_requests"] == ghost.num_later_requests
    half, double, _ = (ghost.hit_ratio for ghost in ghosts if ghost.policy == "reuse_hazard")
    assert double > half + 0.1, "seven prompts need more room than there is"


def test_evictions_show_how_old_and_how_far_apart(llm, server):
    """Forty different prompts through twenty-four blocks."""
    state, url = server
    for number in range(40):
        asyncio.run(ask(state, ANN, f"{number:02} is another prompt", tokens=1))
    await_idle(llm)
    page = scrape(url)
    stats = llm.cache_stats
    assert stats.evicted_blocks > 0
    assert page.value("ostinato_evicted_blocks_total") == stats.evicted_blocks
    assert page.value("ostinato_eviction_age_seconds_count") == stats.evicted_blocks
    assert page.value("ostinato_eviction_age_seconds_sum") == stats.eviction_ages_s.total
    assert page.value("ostinato_reuse_distance_blocks_count") == stats.reuse_distances.num_values
    states = {state: page.value("ostinato_blocks", state=state) for state in (
        "unused", "private", "held", "evictable")}  # fmt: skip
    assert states["private"] == states["held"] == 0
    assert states["evictable"] == llm.engine.cache.manager.pool.num_evictable > 0


def test_names_and_units_follow_the_conventions(server):
    """What ``promtool check metrics`` would say, in short."""
    state, url = server
    asyncio.run(ask(state, ANN, "abc"))
    page = scrape(url)
    units = ("seconds", "bytes", "tokens", "blocks", "sequences", "requests")
    assert len(page.families) > 20
    for family in page.families:
        assert re.fullmatch(r"(ostinato|process)_[a-z][a-z0-9_]*", family.name), family.name
        assert family.documentation.endswith("."), f"{family.name} has no sentence"
        assert not re.search(r"_(ms|millis\w*|minutes|percent|ratio\w+)$", family.name)
        if family.name.startswith("process_"):
            continue
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        else:
            assert not family.name.endswith("_total"), family.name
        if family.type == "histogram":
            assert family.name.endswith(units), family.name
            check_histogram(family)
    # A colon is for recording rules, a label never repeats what the name says.
    for sample in page.samples:
        for label, value in sample.labels.items():
            assert re.fullmatch(r"[a-z_]+", label), label
            assert "salt" not in value and "ann" not in value.split(), value


def check_histogram(family) -> None:
    """Counts never fall with the bound, and the last one is the number of all."""
    series: dict[tuple, list[tuple[float, float]]] = {}
    counts: dict[tuple, float] = {}
    for sample in family.samples:
        rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        if sample.name.endswith("_bucket"):
            series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
        if sample.name.endswith("_count"):
            counts[rest] = sample.value
    for rest, buckets in series.items():
        assert buckets == sorted(buckets), family.name
        assert buckets[-1] == (float("inf"), counts[rest]), family.name


def test_tenants_are_named_only_if_the_administrator_says_so(llm):
    state = ServerState(llm, ServerConfig(metrics_tenant_names=True))
    with serving(state) as url:
        asyncio.run(ask(state, ANN, "abc"))
        assert scrape(url).labels("ostinato_tenant_prompt_tokens_total", "tenant") == {"ann"}


def test_seventy_tenants_are_sixty_five_labels(server):
    state, url = server
    for number in range(70):
        asyncio.run(ask(state, Caller(f"tenant {number}", f"salt {number}"), "abc", tokens=1))
    page = scrape(url)
    name = "ostinato_tenant_prompt_tokens_total"
    assert len(page.labels(name, "tenant")) == 65
    assert page.value(name, tenant="tenant-65", result="miss") == 6 * 3


def test_routes_are_counted_by_template_and_unknown_addresses_not_at_all(server):
    _, url = server
    httpx.get(f"{url}/v1/models/tiny-shakespeare")
    httpx.get(f"{url}/v1/models/secret-in-the-address")
    httpx.get(f"{url}/another/secret")
    httpx.post(f"{url}/v1/models", content=b"\xff")
    page = scrape(url)
    name = "ostinato_http_requests_total"
    assert page.value(name, route="/v1/models/{name:path}", status="200") == 1
    assert page.value(name, route="/v1/models/{name:path}", status="404") == 1
    assert page.value(name, route="(none)", status="404") == 1
    assert page.value(name, route="(none)", status="400") == 1
    assert not any("secret" in str(sample.labels) for sample in page.samples)


def test_the_administrator_alone_may_scrape(llm):
    class OnlyTenants:
        def identify(self, headers) -> Caller:
            return ANN

    state = ServerState(llm, ServerConfig(), OnlyTenants())
    with serving(state) as url:
        answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "not_an_administrator"


def test_refusals_and_readers_who_left_are_counted(llm):
    state = ServerState(llm, ServerConfig(max_requests=1))

    async def leave() -> None:
        params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
        call = GenerateCall(endpoint="/test", params=params, prompt=sender(ANN, text="abc"))
        stream = serve(state, ANN, call)
        await anext(stream)
        with pytest.raises(ApiError):
            await ask(state, ANN, "abc")
        await stream.aclose()

    with serving(state) as url:
        asyncio.run(leave())
        page = scrape(url)
    assert page.value("ostinato_requests_total", finish_reason="gone") == 1
    assert page.value("ostinato_refused_requests_total", status="429") == 1


@pytest.mark.parametrize("path", GENERATING)
def test_every_api_counts_the_requests_that_a_full_server_refuses(llm, path):
    state = ServerState(llm, ServerConfig(max_requests=1))
    state.rate_limit.enter(ANONYMOUS, 1)
    with serving(state) as url:
        endpoint = ENDPOINTS[path]
        answer = httpx.post(f"{url}{path}", json={**endpoint.body("abc"), endpoint.limit: 1})
        state.rate_limit.leave(ANONYMOUS, 1)
        page = scrape(url)
    assert answer.status_code == 429
    assert page.value("ostinato_refused_requests_total", status="429") == 1


def test_a_scrape_is_answered_while_a_step_takes_long(llm, server):
    """The engine is held up in a forward pass; the page shows what was seen last."""
    state, url = server
    scrape(url)
    with ThreadPoolExecutor(1) as pool, held_up(llm.engine.runner) as begun:
        asking = pool.submit(asyncio.run, ask(state, ANN, "hold", tokens=1))
        assert begun.wait(60)
        scrape(url)
    asking.result()


def test_shares_have_four_labels():
    shares = (0, 0.1, 0.5, 0.89, 0.9, 1)
    assert [hit_share_label(share) for share in shares] == [
        "none", "below_half", "half_or_more", "half_or_more", "nearly_all", "nearly_all",
    ]  # fmt: skip


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(llm):
    """And every metric of ours but the HTTP times is on it."""
    path = Path(ostinato.server.__file__).parent / "dashboards" / "ostinato.json"
    board = json.loads(path.read_text(encoding="utf-8"))
    state = ServerState(llm, ServerConfig(max_requests=1))
    with serving(state) as url:
        asyncio.run(ask(state, ANN, "abc"))
        asyncio.run(go_round(state))
        state.is_draining = True
        with pytest.raises(ApiError):
            asyncio.run(ask(state, ANN, "abc"))
        state.is_draining = False
        scrape(url)  # its answer is counted in the next one
        page = scrape(url)
    there = {sample.name for sample in page.samples}
    labels = {label for sample in page.samples for label in sample.labels} | {"instance"}
    asked: set[str] = set()
    for panel in board["panels"]:
        assert panel["title"] and panel["targets"]
        for target in panel["targets"]:
            names = set(re.findall(r"ostinato_\w+", target["expr"]))
            used = set(re.findall(r"(\w+)\s*[!=]=?~?\"", target["expr"]))
            used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert names and names <= there, (panel["title"], names - there)
            assert used <= labels, (panel["title"], used - labels)
            asked |= names
    ours = {name for name in there if name.startswith("ostinato_")}
    ours -= {name for name in ours if name.endswith(("_created", "_sum", "_count", "_info"))}
    assert {re.sub("_bucket$", "", name) for name in ours - asked} <= {
        "ostinato_http_request_duration_seconds", "ostinato_looked_up_tokens_total",
    }  # fmt: skip
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"])
             for y in range(p["y"], p["y"] + p["h"])]  # fmt: skip
    assert len(cells) == len(set(cells)), "panels overlap"


def test_every_metric_is_stated_in_the_tables_and_every_row_is_a_metric(server):
    """Those of tiers and of the ledger need tiers and a tokenizer."""
    state, url = server
    asyncio.run(ask(state, ANN, "abc"))
    names = {family.name.removesuffix("_info") for family in scrape(url).families}
    families = {n for n in names if n.startswith("ostinato_") and not n.endswith("_created")}
    stated = {f"ostinato_{figure.name}" for figure in (*FIGURES, *REQUEST_FIGURES)}
    tiers = {name for name in stated if name.startswith("ostinato_tier_")}
    assert stated - families == tiers and families <= stated

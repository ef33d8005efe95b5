"""``ostinato simulate`` and ``ostinato plan``, as a user sees them."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ostinato import LLM, SamplingParams
from ostinato.cli.options import cost_options as _cost_options
from ostinato.lab.work.cost_model import ASSUMED
from tests.cli.terminal import Terminal, unwrapped
from tests.lab.size import known_configs
from tests.lab.traces.small_traces import write_mooncake

WINDOWED: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 100, "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Chats of three turns: each turn begins with all blocks of the one before."""
    rows = []
    for number in range(60):
        chat, turn = number % 20, number // 20
        blocks = [1] + [chat * 10 + 2 + place for place in range(turn + 1)]
        rows.append((number * 1000, len(blocks) * 512 + 100, 20, blocks))
    return str(write_mooncake(tmp_path / "chats.jsonl", rows))


def test_it_prints_hits_by_policy_and_size_beside_the_bounds(terminal: Terminal, trace):
    text = terminal.show("simulate", trace, "-c", "10,30,100", "--timed-requests", "0")

    assert "chats.jsonl: 60 requests in 59.0 s" in text
    rows = dict(re.findall(r"^ (\w[\w, ]*?) {2,}(.+?) *$", text, re.MULTILINE))
    table = {name: [float(x.rstrip("%")) for x in cells.split()] for name, cells in rows.items()}
    assert {"lru", "reuse_hazard", "Belady", "Belady, bypass"} <= set(table)
    for ratios in table.values():
        assert ratios == sorted(ratios) and ratios[-1] == table["lru"][-1]
        assert all(a <= b for a, b in zip(ratios, table["Belady, bypass"], strict=True))
    # 19 chats of the first round find one block, all 20 of the second two, of the third three.
    share = (19 * 1 + 20 * 2 + 20 * 3) * 512 / sum((n + 1) * 512 + 100 for n in (1, 2, 3)) / 20
    assert table["lru"][-1] == round(100 * share, 1)
    said = f"A cache that never evicts, from 61 blocks on, finds {share:.1%}"
    assert said in unwrapped(text)


def test_times_come_from_the_real_scheduler(terminal: Terminal, trace):
    args = ("-p", "lru", "--timed-capacity", "200", "--slowdown", "1", "--prefill-rate", "1000")
    figures = json.loads(terminal.show("simulate", trace, *args, "--no-bounds", "--json"))

    timed = figures["timed"]
    assert timed["no cache"]["hit_ratio"] == 0 and timed["lru"]["hit_ratio"] > 0.5
    assert timed["lru"]["first_token_s"]["50"] < timed["no cache"]["first_token_s"]["50"]
    assert timed["lru"]["num_served"] == figures["num_requests"] == 60
    assert figures["slowdown"] == 1 and figures["cost"] == "given" and figures["bounds"] == {}


def test_a_disk_behind_the_pool_finds_what_a_larger_pool_would(terminal: Terminal, trace):
    """Ten blocks and a disk of a hundred hit as a hundred blocks do, and sooner than ten alone."""
    disk = ("-p", "lru", "-c", "10,100", "--tiers", "100", "--timed-capacity", "10")
    args = ("--slowdown", "1", "--prefill-rate", "1000", "--no-bounds", "--json")
    figures = json.loads(terminal.show("simulate", trace, *disk, *args))
    small, large = figures["hit_ratio"]["lru"]
    assert figures["disk"]["hit_ratio"] == [large, large] and small < large
    assert figures["disk"]["loaded_tokens"][0] > 0 == figures["disk"]["loaded_tokens"][1]
    timed = figures["timed"]
    assert timed["lru + disk"]["hit_ratio"] > timed["lru"]["hit_ratio"]
    assert timed["lru + disk"]["first_token_s"]["50"] < timed["lru"]["first_token_s"]["50"]
    assert timed["lru + disk"]["num_served"] == 60


def test_a_disk_keeps_windows_before_ends_alone(terminal: Terminal, tmp_path):
    """A disk for 130 blocks of all layers keeps 400, of which most layers need the last three."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WINDOWED))
    paths = [[1000 * (n % 20) + place for place in range(20)] for n in range(40)]
    rows = [(1000 * n, 20 * 512 + 100, 20, path) for n, path in enumerate(paths)]
    trace = str(write_mooncake(tmp_path / "long.jsonl", rows))
    size = ("-p", "lru", "-c", "25", "--tiers", "130", "--timed-capacity", "50")
    args = (*size, "--prefill-rate", "1000", "--no-bounds", "--json")
    full = json.loads(terminal.show("simulate", trace, *args))
    windows = json.loads(terminal.show("simulate", trace, *args, "-m", str(config)))
    assert windows["disk"]["hit_ratio"][0] > 0.49 > 0.2 > full["disk"]["hit_ratio"][0]
    timed = windows["timed"]
    assert timed["lru + disk"]["hit_ratio"] > 0.4 > timed["lru"]["hit_ratio"]
    assert timed["lru + disk"]["num_served"] == 40


def test_out_holds_plots_and_a_page_that_needs_nothing_else(terminal: Terminal, trace, tmp_path):
    out = tmp_path / "report"
    result = terminal.run("simulate", trace, "-p", "lru,reuse_hazard", "-o", str(out))
    assert result.exit_code == 0 and "Written to" in result.stderr

    for name in ("hits", "first-token", "occupancy"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3 and "<td>lru</td>" in page and "chats.jsonl" in page
    assert not re.search(r"<script|<link|src=|url\(http", page)


def test_memory_needs_a_model(terminal: Terminal, trace):
    assert "the size of a token is unknown: add --model" in terminal.refuse(
        "simulate", trace, "-c", "1GiB"
    )
    text = terminal.show(
        "simulate", trace, "-c", "64MiB", "-m", "tiny-shakespeare", "--timed-requests", "0"
    )
    assert "64 MiB" in unwrapped(text)
    assert "hold no block of 512 tokens" in terminal.refuse(
        "simulate", trace, "-c", "1KiB", "-m", "tiny-shakespeare"
    )


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["-p", "luck"], "policy='luck'"),
        (["-p", "arc"], "policy='arc': must be one of lru, reuse_hazard; s3fifo, arc"),
        (["-c", "0"], "capacity='0'"),
        (["-c", "-1"], "capacity='-1'"),
        (["-c", "1.0005k"], "capacity='1.0005k'"),
        (["-c", "1e3"], "capacity='1e3': must be a number of blocks such as 2000 or 2k, or memory"),
        (["-c", "5,"], "capacity='': must be a number of blocks"),
        (["--slowdown", "0"], "slowdown=0.0: must be above 0"),
        (["--slowdown", "1e300"], "slowdown=1e+300"),
        (["--timed-capacity", "0"], "timed_capacity=0"),
        (["--block-size", "16"], "block_size=16: chats.jsonl lists blocks of 512 tokens"),
        (["--prefill-rate", "-1"], "prefill_rate=-1.0: must be above 0"),
        (["--prefill-rate", "1", "--measure", "m"], "give one of them"),
        (["--gpu", "h999"], "gpu='h999': must be one of h100"),
        (["--gpu", "l4"], "gpu: needs the model that runs there; add --model"),
        (["--gpu", "l4", "--prefill-rate", "1"], "either derived from a machine or given"),
        (["--gpus", "0"], "gpus=0"),
        (["--kv-cache-dtype", "int7"], "kv_cache_dtype='int7': must be one of auto"),
        (["--compute-share", "2"], "compute_share=2.0"),
        (["--timestamp-unit", "h"], "timestamp_unit='h': must be one of auto, s, ms"),
        (["--out", "/dev/null/x"], "out='/dev/null/x'"),
        (["--out", __file__], "is no folder; choose another folder"),
    ],
)
def test_wrong_options_are_refused_by_name_before_the_work(terminal: Terminal, trace, args, reason):
    assert reason in terminal.refuse("simulate", trace, "--no-bounds", "-p", "lru", *args)


def test_a_cache_beyond_all_measure_is_one_that_never_evicts(terminal: Terminal, trace):
    how = (
        "-p", "lru,reuse_hazard", "-c", "100,99999999999999", "--timed-capacity", "99999999999999",
    )  # fmt: skip
    figures = json.loads(terminal.show("simulate", trace, *how, "--json"))
    assert figures["capacities"] == [100, 99999999999999]
    assert figures["hit_ratio"]["reuse_hazard"][1] == figures["unbounded"]
    assert figures["timed"]["lru"]["hit_ratio"] == pytest.approx(figures["unbounded"], abs=0.02)


def test_gaps_are_said_to_be_stretched_for_the_engine_only_where_they_are(
    terminal: Terminal, trace
):
    how = ("simulate", trace, "-p", "lru", "--no-bounds", "--prefill-rate", "100")
    chosen = unwrapped(terminal.show(*how))
    assert "times as long, so that one engine can serve them." in chosen
    given = unwrapped(terminal.show(*how, "--slowdown", "30"))
    assert "gaps between arrivals are 30 times as long." in given


def test_broken_lines_are_refused_or_named_and_left_out(terminal: Terminal, trace):
    with open(trace, "a", encoding="utf-8") as file:
        file.write('{"torn')
    assert "chats.jsonl, line 61: this is no JSON" in terminal.refuse("simulate", trace)
    how = ("--skip-broken", "-p", "lru", "--timed-requests", "0", "--no-bounds", "--json")
    result = terminal.run("simulate", trace, *how)
    assert "line 61 left out: this is no JSON" in result.stderr
    assert json.loads(result.stdout)["lines_left_out"] == [61]


def test_a_log_of_requests_is_read_with_a_models_tokenizer(terminal: Terminal, tmp_path):
    log = tmp_path / "log.jsonl"
    prompts = ["To be, or not to be, that is the question", "To be, or not to be, my lord"]
    log.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    how = ("-p", "lru", "--timed-requests", "0", "--json")
    assert "give a model, for its tokenizer" in terminal.refuse("simulate", str(log), *how)
    args = (*how, "--tokenizer", "tiny-shakespeare", "-b", "4")
    figures = json.loads(terminal.show("simulate", str(log), *args))
    assert figures["num_requests"] == 2 and figures["unbounded"] > 0.2


def test_a_recording_is_simulated_and_planned_with_the_weight_of_its_own_model(
    terminal: Terminal, tmp_path
):
    path = tmp_path / "trace"
    with LLM(num_blocks=64, block_size=4, record_trace=path) as llm:
        for end in ("that is", "that was", "my lord"):
            llm.generate(
                f"To be, or not to be, {end}", SamplingParams(max_tokens=4), use_tqdm=False
            )
    figures = json.loads(terminal.show("simulate", str(path), "--timed-requests", "0", "--json"))
    assert figures["block_tokens"] == 4 and figures["token_bytes"] > 0
    assert figures["unbounded"] > 0.4
    assert figures["replayed"] == {"num_requests": 3, "num_agreeing": 3}
    timed = ("-p", "lru", "--no-bounds", "--json")
    figures = json.loads(terminal.show("simulate", str(path), *timed))
    assert figures["cost"] == "as measured when it was recorded"
    figures = json.loads(terminal.show("simulate", str(path), *timed, "--step-ms", "2"))
    assert figures["cost"] == "given"
    text = terminal.show("simulate", str(path), "--timed-requests", "0", "-p", "lru")
    assert "each of the 3 requests found what it had found" in unwrapped(text)
    page = tmp_path / "report"
    terminal.run("simulate", str(path), "--timed-requests", "0", "-p", "lru", "-o", str(page))
    assert "each of the 3 requests found what it had found" in (page / "report.html").read_text()
    plan = json.loads(terminal.show("plan", str(path), "--json"))
    assert plan["options"][-1]["affinity"]["hit_ratio"] == pytest.approx(figures["unbounded"])


def test_sizes_are_read_as_tables_print_them(terminal: Terminal, trace):
    how = ("simulate", trace, "-p", "lru", "--no-bounds", "--timed-requests", "0", "--json")
    figures = json.loads(terminal.show(*how, "-c", "20, 1k,1.5M"))
    assert figures["capacities"] == [20, 1000, 1_500_000]
    tiny = ("-m", "tiny-shakespeare")
    table = terminal.show(
        "simulate", trace, "-p", "lru", "-c", "2k", "--timed-requests", "0", *tiny
    )
    printed = re.search(r"[\d.]+ (MiB|GiB)", table)
    figures = json.loads(terminal.show(*how, *tiny, "-c", printed[0].replace(" ", "")))
    assert figures["capacities"] == [pytest.approx(2000, rel=0.01)]


def test_the_unit_of_time_is_said_and_can_be_given(terminal: Terminal, trace):
    how = ("simulate", trace, "-p", "lru", "--no-bounds", "--timed-requests", "0")
    assert "Timestamps are read as milliseconds." in terminal.show(*how)
    given = terminal.show(*how, "--timestamp-unit", "s")
    assert "Timestamps are read as seconds." in given and "60 requests in 16 hours" in given


def test_a_plan_says_in_words_what_to_buy(terminal: Terminal, trace, tmp_path):
    how = ("plan", trace, "-m", "tiny-shakespeare", "--currency", "EUR", "--points", "3")
    slow = ("--prefill-rate", "500")
    result = terminal.run(*how, *slow, "--out", str(tmp_path))
    text = unwrapped(result.stdout)
    assert re.search(r"Give each replica [\d.]+ MiB for the cache, and route requests", text)
    assert re.search(r"\d+ replicas? serves? this traffic instead of \d+, for [\d.]+ instead", text)
    assert "lowest bill" in text and "evicts nothing" in text and "…" not in text
    assert "An hour of a GPU is 2.5 EUR, a GiB of further memory 0.005." in text
    assert "blocks are evicted by reuse_hazard" in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "Give each replica" in page and page.count("<svg") == 1
    assert "An hour of a GPU is 2.5 EUR" in page and "EUR/h" in page

    dear = terminal.show(*how, *slow, "--memory-price", "1e9")
    assert "Buy no memory for this cache alone" in unwrapped(dear)
    assert "…" not in dear and "memory would pay below" in dear
    assert "does not have the size of a token: add --model" in terminal.refuse("plan", trace)
    assert "points=1000000000: 200 at most" in terminal.refuse(*how, "--points", "1000000000")
    assert "utilisation=2.0: must be above 0" in terminal.refuse(*how, "--utilisation", "2")
    assert "choose another folder" in terminal.refuse(*how, "--out", __file__)


def test_a_plan_prices_each_model_by_its_own_config(terminal: Terminal, trace, tmp_path):
    """The same traffic: 70B needs more of the same GPUs than 8B, and its weights must fit."""

    def plan(name: str, *more: str) -> dict[str, Any]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(getattr(known_configs, name)))
        how = ("plan", trace, "-m", str(path), "--points", "2", "-p", "lru", *more, "--json")
        return json.loads(terminal.show(*how))

    small, large = plan("LLAMA_3_1_8B"), plan("LLAMA_3_1_70B")
    assert (small["gpus_per_replica"], large["gpus_per_replica"]) == (1, 4)
    assert small["token_bytes"] < large["token_bytes"] == 327_680
    assert small["without_cache"]["money"] < large["without_cache"]["money"]
    assert "70.6B parameters in bf16 on 4 x h100" in large["cost"]
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"lora_A": np.zeros((2**10, 2**10), np.float32)}, weights)
    beside = plan("LLAMA_3_1_8B", "--lora", str(tmp_path))
    assert small["own_bytes"] - beside["own_bytes"] == 2**20 * 2
    head = json.dumps({"lora_A": {"dtype": "F32", "shape": [2**20, 2**20]}}).encode()
    weights.write_bytes(len(head).to_bytes(8, "little") + head)
    more = ("-m", str(tmp_path / "config.json"), "--lora", str(tmp_path))
    assert "adapters and encoder take 2 TiB, more than the 56.7 GiB" in terminal.refuse(
        "plan", trace, *more
    )
    kept = ("--kv-cache-dtype", "int8")
    wide = plan("LLAMA_3_1_70B", "--gpu", "h200", "--gpus", "2", *kept)
    assert (wide["gpus_per_replica"], wide["token_bytes"]) == (2, 80 * 8 * 2 * (128 + 4))
    path = str(tmp_path / "config.json")
    refused = terminal.refuse("plan", trace, "-m", path, "--gpus", "1")
    assert "131.4 GiB of weights do not fit" in refused and "2 are the least" in refused


def test_costs_are_measured_on_this_machine(terminal: Terminal, trace, monkeypatch):
    """With short prompts, where ``ostinato simulate`` takes those of the model's length."""
    measure = partial(_cost_options.measure_cost, max_model_len=256)
    monkeypatch.setattr(_cost_options, "measure_cost", measure)
    how = (trace, "-m", "tiny-shakespeare", "--measure", "tiny-shakespeare", "--json")
    result = terminal.run("simulate", *how, "--no-bounds")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cost"] == "measured: tiny-shakespeare on this machine"
    fitted = r"ms per step, .* us per token, .* ns per pair; half of the \d+ steps within \d+%"
    assert re.search(fitted, unwrapped(result.stderr))

    monkeypatch.setattr(_cost_options, "measure_cost", lambda model: replace(ASSUMED, origin=model))
    assert json.loads(terminal.show("plan", *how))["cost"] == "tiny-shakespeare"

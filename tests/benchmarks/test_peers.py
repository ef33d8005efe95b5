"""Engines are measured by turns, on equal terms, and what could not be measured is said."""

import functools
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import command, engines, machine, measures, report, samples, table
from benchmarks.peers.protocol import Served, Talk, common
from benchmarks.peers.workers import gguf_file


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """A run of the real command: ours and transformers, each in a process of its own."""
    out = tmp_path_factory.mktemp("found")
    names = "cold_prefill,batch_warm,conversations,decode_16_16k,manager_hit"
    arguments = ["--quick", "--out", str(out), "--peer", f"transformers={sys.prefix}"]
    arguments += ["--engines", "ours,transformers,ours-manager,vllm", "--measures", names]
    arguments += ["--threads", "1", "--repetitions", "2", "--limit", "0", "--needed-gib", "0"]
    assert command.main(None, arguments) == 0
    return json.loads((out / "found.json").read_text()), out


def test_a_run_measures_who_is_there_leaves_out_what_is_slow_and_is_stamped(findings):
    """Greedy tokens agree: both compute in bfloat16, and round alike in a model of two layers."""
    told, _ = findings
    rows = {row["name"]: row for row in told["measures"]}
    assert set(rows["cold_prefill"]["figures"]) == {"ours", "transformers"}
    assert set(rows["conversations"]["figures"]) == {"ours"}
    assert set(rows["decode_16_16k"]["figures"]) == {"ours"}
    assert rows["conversations"]["left_out"]["transformers"].endswith("have no scheduler")
    assert set(rows["manager_hit"]["figures"]) == {"ours-manager"} and told["absent"] == ["vllm"]
    for row in rows.values():
        for figure in row["figures"].values():
            assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
        for taken in row["samples"].values():
            assert all(sample["others"] >= 0 and sample["cpu_s"] >= 0 for sample in taken)

    assert told["agreement"] == {"ours": 1.0, "transformers": 1.0}
    assert len(told["engines"]["ours"]["first_outputs"]) == 4
    for name in ("ours", "transformers"):
        assert rows["cold_prefill"]["figures"][name]["samples"] == 1
        assert rows["cold_prefill"]["left_out"][name].startswith("1 of 2 repetitions: a sample")
    stamp = told["stamp"]
    assert stamp["bandwidth_gb_s"] > 0 and stamp["cores"] >= 1
    assert stamp["commit"] and stamp["date"] and stamp["threads"] == 1


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (str(Path("/", "home", "ada", "found")), "found"),
        ("vllm=" + str(Path("/", "srv", "vllm")), "vllm=vllm"),
        ("benchmarks/peers/run.py", "benchmarks/peers/run.py"),
        ("cold_prefill,decode_1", "cold_prefill,decode_1"),
    ],
)
def test_the_command_is_stamped_without_folders_of_one_machine(argument, shown):
    assert machine.without_folders(argument) == shown


def test_figures_of_a_quick_run_do_not_get_into_the_docs(findings, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")
    path = str(findings[1] / "found.json")
    monkeypatch.setattr(sys, "argv", ["table.py", path, "--page", str(page)])
    with pytest.raises(SystemExit):
        table.main()
    assert "--quick" in capsys.readouterr().err
    assert page.read_text() == f"{table.BEGIN}\n{table.END}\n"


def test_a_run_leaves_a_plot_and_the_logs_of_its_workers(findings):
    assert (findings[1] / "found.png").read_bytes().startswith(b"\x89PNG")
    assert (findings[1] / "ours.log").is_file()


def test_the_table_of_a_page_is_replaced_and_the_rest_stays(findings, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{table.BEGIN}\nof last year\n{table.END}\n\nThe end.\n")
    for _ in range(2):
        table.rewrite(page, table.markdown(findings[0]))
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nThe end.\n")
    assert "last year" not in text and text.count(table.BEGIN) == 1
    assert "| cold prefill, 2,048 tokens, tokens/s |" in text and "vllm: not installed" in text


def test_a_page_without_a_place_for_results_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="no place for results"):
        table.rewrite(page, "results")
    assert page.read_text() == "# Title\n"


def test_each_checkpoint_number_of_bits_and_processor_has_a_place_of_its_own_for_results():
    text = table.PAGE.read_text()
    zen = {"stamp": {"flags": ["avx2", "avx512_bf16"]}}
    runs = [{"stamp": {"flags": ["avx2", "amx_bf16"]}}, zen]
    runs += [{**zen, "weight_bits": 8}, {**zen, "weight_bits": 4}, {**zen, "checkpoint": "smollm2"}]
    runs += [{**runs[-1], "measures": [{"name": "http_8"}]}]
    runs += [{**zen, "measures": [{"name": "manager_hit"}]}]
    assert [text.count(mark) for run in runs for mark in table.marks(run)] == [1] * 14
    assert len({table.plot_of(run) for run in runs}) == 7


def test_every_measure_is_described_in_the_docs():
    text = (table.ROOT / "docs/benchmarks.md").read_text()
    for measure in measures.MEASURES:
        assert f"`{measure.name}`" in text, measure.name


def test_every_tensor_of_the_checkpoint_has_a_name_of_its_own_in_llama_cpp(findings):
    [weights] = findings[1].glob("peers-models-*/small/model.safetensors")
    size = int.from_bytes(weights.read_bytes()[:8], "little")
    tensors = [name for name in json.loads(weights.read_bytes()[8 : 8 + size]) if name[0] != "_"]
    names = {gguf_file.name_of(name) for name in tensors}
    assert len(names) == len(tensors) == 2 * 11 + 2
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_q_norm.weight"} <= names


def test_decoding_counts_from_the_moment_when_all_requests_have_a_first_token():
    """The early one's 5 tokens of 1 s to 5 s count by half from 3 s on; the other's are all."""
    served = Served(5.0, first=[1.0, 3.0], last=[5.0, 5.0], tokens=[5, 5])
    assert samples.decode_rate(served) == (4 * 0.5 + 4) / 2


class Recorder:
    """Keeps the prompts that a measure sends."""

    def __init__(self):
        self.prompts = []

    def serve(self, talks):
        self.prompts += [turn[0] for talk in talks for turn in talk]
        count = sum(map(len, talks))
        return Served(1.0, [0.5] * count, [1.0] * count, [2] * count)


@pytest.mark.parametrize("name", [m.name for m in measures.MEASURES if m.kind == "serve"])
def test_cold_prompts_are_new_each_time_and_warm_ones_share_what_was_served(name):
    """And two engines get the same prompts."""
    [measure] = measures.named([name])
    sizes, sent = samples.QUICK, []
    for _engine in range(2):
        recorder = Recorder()
        prefix = []
        if measure.prepare:
            prefix = measure.prepare(recorder, samples.Draw(512, name, "prepare"), sizes)
        for number in range(2):
            measure.sample(recorder, samples.Draw(512, name, number), sizes, prefix)
        sent.append(recorder.prompts)
    assert sent[0] == sent[1]
    first, last = sent[0][0], sent[0][-1]
    assert common([first, last]) == len(prefix), "repetitions share the warm prefix, and no more"
    assert 0 not in {token for prompt in sent[0] for token in prompt}, "the token that ends texts"


def test_a_ratio_above_one_is_ahead_for_rates_and_for_times():
    rate = {"figures": {"ours": {"median": 20}, "vllm": {"median": 10}}, "more_is_better": True}
    time = {"figures": {"ours": {"median": 1}, "vllm": {"median": 2}}, "more_is_better": False}
    assert report.ratios(rate) == report.ratios(time) == {"vllm": 2.0}


def test_a_variant_is_ours_with_other_settings():
    variant = engines.parse_variant("big:block_size=64,read_once=never,seal_tails=False")
    assert variant.name == "ours:big" and variant.is_ours
    assert variant.settings == {"block_size": 64, "read_once": "never", "seal_tails": False}


def test_a_variant_of_a_peer_is_the_peer_with_other_settings():
    variant = engines.parse_variant("vllm@32:block_size=32")
    assert (variant.base, variant.home, variant.worker) == ("vllm", "vllm", "vllm")
    assert variant.settings == {"block_size": 32} and not variant.is_ours
    server = engines.parse_variant("vllm-server@32:block_size=32")
    assert server.kind == "http" and server.settings == {"server": "vllm", "block_size": 32}


def test_with_fewer_bits_each_engine_takes_its_own_format():
    """Ours keeps its name, so that ratios are those of this format."""
    chosen = {engine.name: engine for engine in engines.serving_engines(4, 8)}
    assert chosen["ours"].settings == {"quantization": "int4", "kv_cache_dtype": "int8"}
    assert chosen["openvino"].settings == {"weights": "int4", "kv": "u8"}
    assert chosen["llamacpp@Q4_K_M"].settings == {"weights": "Q4_K_M", "kv": "Q8_0"}
    assert chosen["llamacpp"].title == "llama.cpp, Q4_0, 8-bit KV"
    assert chosen["ours:w4a8"].title == "Ostinato, w4a8, 8-bit KV"
    assert chosen["ours:16"].settings == {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    others = {"ours:w4a8", "ours:16", "openvino", "llamacpp", "llamacpp@Q4_K_M"}
    assert set(chosen) == {"ours"} | others


def test_goals_are_those_of_the_processor_or_of_the_bits_of_weights():
    amx, zen = ({"flags": ["avx2", flag]} for flag in ("amx_bf16", "avx512_bf16"))
    goal = functools.partial(measures.goal_of, "cold_prefill")
    assert goal({"quick": False, "stamp": amx}) == 1.5
    assert goal({"quick": False, "stamp": zen}) == 1.2
    assert goal({"quick": True, "stamp": zen}) is None
    assert goal({"quick": False, "stamp": zen, "weight_bits": 8}) is None
    assert measures.goal_of("decode_16", {"quick": False, "stamp": amx, "weight_bits": 8}) == 2.2
    smollm2 = {"quick": False, "stamp": zen, "checkpoint": "smollm2"}
    assert goal(smollm2) is None and measures.goal_of("http_1", smollm2) == 1.2


def test_what_a_peer_wants_preloaded_and_is_not_there_is_said(tmp_path):
    vllm = engines.parse_variant("vllm@32:block_size=32")
    words = engines.warnings_about(vllm, tmp_path / "bin" / "python")
    [word] = [word for word in words if "libiomp5" in word]
    assert word.endswith("its figures may be too low")
    assert engines.warnings_about(engines.OURS, tmp_path) == []


def test_chats_over_http_begin_with_one_system_prompt_that_is_warm():
    """A turn whose answer has no tokens is the system's; every chat has the same."""
    sent: list[Talk] = []

    class Client:
        def serve(self, talks):
            sent.extend(talks)
            return Served(seconds=2.0)

    [measure] = measures.named(["http_8"])
    system = measure.prepare(Client(), samples.Draw(512, "prepare"), samples.QUICK)
    rate = measure.sample(Client(), samples.Draw(512, 1), samples.QUICK, system)
    assert rate == 8 * samples.QUICK.http_turns / 2.0
    assert [talk[0] for talk in sent] == [(system, 0)] * 9
    assert {num for talk in sent[1:] for _, num in talk[1:]} == {samples.QUICK.http_answer}


def test_measures_over_http_need_a_model_with_text(capsys, tmp_path):
    with pytest.raises(SystemExit):
        command.main(None, ["--quick", "--measures", "http", "--out", str(tmp_path)])
    assert "they need --checkpoint smollm2" in capsys.readouterr().err


def test_pieces_of_a_text_are_drawn_alike_for_all():
    text = list(range(1, 500))
    pieces = [samples.Draw(512, "seed", text=text)(40) for _ in range(2)]
    assert pieces[0] == pieces[1] == list(range(pieces[0][0], pieces[0][0] + 40))
    assert samples.Draw(512, "other", text=text)(40) != pieces[0]


@pytest.mark.parametrize("text", ["big", "big:block_size", ":block_size=64", "big:=64"])
def test_what_is_no_variant_is_refused(text):
    with pytest.raises(ValueError, match="is no variant"):
        engines.parse_variant(text)


@pytest.mark.parametrize(
    "arguments",
    [["--measures", "warp"], ["--engines", "warp"], ["--peer", "warp=x"], ["--variant", "warp"]],
)
def test_what_does_not_exist_is_refused_before_anything_runs(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(None, ["--quick", "--out", str(tmp_path), *arguments])
    assert "warp" in capsys.readouterr().err


def test_figures_fit_a_terminal_of_eighty_columns():
    """They are read there while it runs; a cell that is cut says nothing."""
    figure = {"median": 123_456.0, "lowest": 98_765.0, "highest": 234_567.0, "samples": 10}
    figure |= {"cpu_s": 1234.5, "cached": 123_456, "others": 12.34}
    row = {"name": "cold_prefill", "title": "cold prefill", "unit": "tokens/s"}
    row |= {"left_out": {"vllm": "too slow"}, "more_is_better": True}
    row |= {"figures": {"sglang-manager": figure, "ours:never": {**figure, "cached": None}}}
    row |= {"ratios": {"sglang-manager": 1.1}}
    stamp = dict.fromkeys(
        ("processor", "cores", "memory_gib", "system", "threads", "bandwidth_gb_s", "commit",
         "date", "command"), "x",
    ) | {"flags": ["avx512_bf16"]}  # fmt: skip
    findings = {"quick": False, "stamp": stamp, "measures": [row], "agreement": {"vllm": 1.0}}
    out = io.StringIO()
    report.show(findings, Console(file=out, width=300))
    lines = out.getvalue().splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines[1:])
    assert "98,765 .. 234,567" in out.getvalue()
    assert "goal ≥ 1.20 × the best: missed" in out.getvalue()

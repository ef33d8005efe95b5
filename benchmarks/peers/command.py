"""The command line of the comparison."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command_line import parser_of
from benchmarks.peers import engines, report
from benchmarks.peers.checkpoint import SMOLLM2, make_checkpoint, make_smollm2, read_text
from benchmarks.peers.machine import available_gib, stamp, touch_memory
from benchmarks.peers.measures import Measure, named
from benchmarks.peers.samples import FULL, QUICK, Sizes
from benchmarks.peers.session import NEEDED_GIB, Findings, Plan, Session
from benchmarks.peers.shapes import SHAPES, SMALL, Shape
from ostinato.errors import ModelError


def main(description: str | None = None, arguments: list[str] | None = None) -> int:
    """Read the command line, measure, and write what was found."""
    parser = make_parser(description)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        plan, absent = make_plan(options)
    except (ValueError, ModelError) as error:
        parser.error(str(error))
    warnings = [
        word
        for each, python in plan.engines.items()
        for word in engines.warnings_about(each, python)
    ]
    for word in warnings:
        console.print(f"warning: {word}")
    for engine in absent:
        console.print(f"{engine.title} ({engine.name}) is not installed, and is left out")
    touched_gib = 0.0 if options.quick else min(options.touch_gib, available_gib() / 2)
    console.print(f"{touched_gib:.0f} GiB touched in {touch_memory(touched_gib):.0f} s")
    findings: dict[str, Any] = {"stamp": stamp(options.threads), "quick": options.quick}
    findings["absent"] = [engine.name for engine in absent]
    findings |= {"warnings": warnings, "checkpoint": options.checkpoint}
    findings["weight_bits"] = options.weight_bits

    def keep(so_far: Findings) -> None:
        findings.update(report.as_json(plan, so_far))
        (options.out / "found.json").write_text(json.dumps(findings, indent=1))

    Session(plan, console.print).run(keep)
    report.show(findings, console)
    report.plot(findings, options.out / "found.png")
    console.print(f"written: {options.out / 'found.json'}, {options.out / 'found.png'}")
    return 0


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = parser_of(description)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for table, JSON, plot and logs")
    add("--peers-folder", type=Path, help="where install.sh put the peers")
    add("--peer", action="append", default=[], metavar="NAME=VENV", help="one peer elsewhere")
    add("--models-folder", type=Path, help="for checkpoints; else PEERS/models, or one that goes")
    add("--checkpoint", choices=[*SHAPES, "smollm2"], default="random",
        help="random weights of a shape, or SmolLM2 with real text")  # fmt: skip
    add("--measures", default="", help="names, with commas between; all but long ones by default")
    add("--engines", default="", help="names, with commas between; all by default")
    add("--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,...",
        help="ours once more, with other settings; PEER@NAME:... is a peer once more")  # fmt: skip
    add("--weight-bits", type=int, choices=[16, 8, 4], default=16,
        help="weights of 8 or 4 bits, in the format that each engine's users take")  # fmt: skip
    add("--kv-bits", type=int, choices=[16, 8], default=16, help="of keys and values")
    add("--repetitions", type=int, default=3)
    add("--threads", type=int, default=2)
    add("--limit", type=float, default=120, help="a sample that takes longer (s) ends its measure")
    add("--timeout", type=float, default=240, help="how long an answer is waited for (s)")
    add("--budget", type=float, default=25, help="minutes, after which one sample has to do")
    add("--needed-gib", type=float, help="free memory without which no engine is started")
    add("--touch-gib", type=float, default=12, help="memory written once before anybody starts")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--quick", action="store_true", help="a small model and short prompts")
    return parser


def make_plan(options: argparse.Namespace) -> tuple[Plan, list[engines.Engine]]:
    """Work out who is measured in what; returns the plan, and who is not installed.

    Raises:
        ValueError: A measure, an engine, a peer or a variant is not known.
    """
    measures = named([name for name in options.measures.split(",") if name])
    wanted = {name for name in options.engines.split(",") if name}
    variants = [engines.parse_variant(text) for text in options.variant]
    serving = engines.serving_engines(options.weight_bits, options.kv_bits)
    known = [*serving, *variants, *engines.SERVERS, *engines.MANAGERS]
    unknown = wanted - {engine.name for engine in known}
    if unknown:
        names = ", ".join(engine.name for engine in known)
        raise ValueError(f"no engine is called {min(unknown)}; there are {names}")
    homes = _homes(options.peer)
    chosen = [each for each in known if not wanted or each.name in wanted or each in variants]
    pythons = {each: engines.python_of(each, options.peers_folder, homes) for each in chosen}
    sizes = QUICK if options.quick else FULL
    model, shape, text = _checkpoint(options)
    measures = _fitting(measures, options, sizes, shape.max_position_embeddings)
    plan = Plan(
        measures=measures,
        engines={each: python for each, python in pythons.items() if python is not None},
        sizes=sizes,
        model=model,
        vocab_size=shape.vocab_size,
        settings=_settings(options, max(getattr(sizes, each.length) for each in measures), shape),
        repetitions=options.repetitions,
        limit_s=options.limit,
        timeout_s=options.timeout,
        budget_s=options.budget * 60,
        folder=options.out,
        needed_gib=_needed_gib(options, model),
        seed=options.seed,
        text=text,
    )  # fmt: skip
    return plan, [each for each, python in pythons.items() if python is None]


def _fitting(
    measures: list[Measure], options: argparse.Namespace, sizes: Sizes, max_tokens: int
) -> list[Measure]:
    """Return the measures that the checkpoint can serve.

    Raises:
        ValueError: None of those that were asked for can be served.
    """
    is_text = options.checkpoint == "smollm2"
    able = [m for m in measures if is_text or not m.needs_text]
    able = [m for m in able if getattr(sizes, m.length) < max_tokens]
    if not able:
        raise ValueError(f"--measures {options.measures}: they need --checkpoint smollm2")
    return able


def _checkpoint(options: argparse.Namespace) -> tuple[Path, Shape, Sequence[int]]:
    """Make the model; returns its folder, its shape, and the text that prompts are made of."""
    folder = _models_folder(options)
    if options.checkpoint == "smollm2":
        model = make_smollm2(folder / "smollm2")
        return model, SMOLLM2, read_text(model)
    if options.quick:
        return make_checkpoint(folder / "small", SMALL), SMALL, ()
    shape = SHAPES[options.checkpoint]
    return make_checkpoint(folder / options.checkpoint, shape), shape, ()


def _settings(options: argparse.Namespace, longest: int, shape: Shape) -> dict[str, Any]:
    """What all engines get; ``kv_gib`` is for those that take no number of tokens."""
    kv_tokens = 8_192 if options.quick else max(24_576, longest + 4_096)
    return {
        "threads": options.threads,
        "kv_tokens": kv_tokens,
        "kv_gib": max(1, -(-kv_tokens * shape.kv_bytes_per_token // 2**30)),
        "max_model_len": min(shape.max_position_embeddings, max(2_048, longest + 2_048)),
        "max_num_seqs": 32,
    }


def _needed_gib(options: argparse.Namespace, model: Path) -> float:
    if options.needed_gib is not None:
        return float(options.needed_gib)
    weights_gib = (model / "model.safetensors").stat().st_size / 2**30
    return 1.0 if options.quick else NEEDED_GIB + weights_gib


def _homes(peers: list[str]) -> dict[str, Path]:
    homes = {}
    for text in peers:
        name, equals, folder = text.partition("=")
        if not equals or name not in {
            engine.home for engine in (*engines.PEERS, *engines.SERVERS, *engines.MANAGERS)
        }:
            raise ValueError(f"--peer {text!r}: write NAME=VENV, with the name of a peer")
        homes[name] = Path(folder)
    return homes


def _models_folder(options: argparse.Namespace) -> Path:
    if options.models_folder is not None:
        return Path(options.models_folder)
    if options.peers_folder is not None:
        return Path(options.peers_folder) / "models"
    return Path(tempfile.mkdtemp(prefix="peers-models-", dir=options.out))

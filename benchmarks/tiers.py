"""Time to first token after a restart, and the cost of writing to a disk.

::

    python -m benchmarks.tiers                        # makes the 0.6B-shaped checkpoint, 2 threads
    python -m benchmarks.tiers --model CHECKPOINT     # of benchmarks/peers/checkpoint.py
    python -m benchmarks.tiers --small                # runs in a minute, says nothing

Processes, one after another, on one folder: the first computes prefixes of random tokens and writes
them when it closes; the next two are restarts, which load them, the short ones and the long one;
the last holds conversations with and without a disk by turns. Every request is a prefix and 32
tokens of its own. The page cache is warm, as after a restart of the process; ``--cold`` drops the
files from it before each load. Memory is touched before each process, since what a virtual machine
has not used yet costs many times as much at first, which a pool meets that is new.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.machine import available_gib, touch_memory
from benchmarks.peers.protocol import Talk
from benchmarks.peers.samples import FULL as SIZES
from benchmarks.peers.samples import Draw, talk
from benchmarks.peers.shapes import FULL, SMALL
from benchmarks.peers.workers.ours import Ours

NUM_PROMPTS = 5
"""Prompts of the usual length; the median is reported."""


PARTS = ("compute", "load", "load-long")

NUM_OWN = 32
"""Tokens behind the prefix, new in each request."""


def prompt(sizes: dict[str, Any], number: int, length: int, own: str) -> list[int]:
    """Draw a prefix that every process draws alike, and tokens of its own behind it."""
    prefix = Draw(sizes["vocab"], "tiers", number, length)(length)
    return prefix + Draw(sizes["vocab"], own, number, length)(NUM_OWN)


def settings(sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the engine's settings."""
    longest = sizes["long"] + 64
    tokens = NUM_PROMPTS * sizes["usual"] + 2 * longest
    made = {"dtype": "bfloat16", "num_blocks": tokens // 16 + 64, "max_model_len": longest}
    return {**made, "kv_disk": folder / "prompts", "kv_disk_bytes": 2**34}


def first_token_s(llm: Any, tokens: list[int]) -> tuple[float, dict[str, int]]:
    """Return the time to the first token, and where the prompt came from."""
    from ostinato import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    return output.timings.time_to_first_token, output.cached_tokens_from


def compute_and_write(sizes: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Compute prefixes, hit them in the pool, and close, which writes them."""
    from ostinato import LLM

    llm = LLM(model, **settings(sizes, folder))
    first_token_s(llm, prompt(sizes, 99, 64, "warm-up"))  # kernels chosen, memory touched
    results: dict[str, Any] = {"computed": [], "pool": []}
    for number in range(NUM_PROMPTS):
        for kind in ("computed", "pool"):
            tokens = prompt(sizes, number, sizes["usual"], kind)
            results[kind].append(first_token_s(llm, tokens)[0])
    for kind in ("computed", "pool"):
        tokens = prompt(sizes, 0, sizes["long"], kind)
        results[f"{kind}_long"] = first_token_s(llm, tokens)[0]
    begun_s = time.perf_counter()
    llm.engine.tiers.stores.queue_everything()
    llm.engine.tiers.stores.flush(120.0)  # closing alone has 20 s, which a slow disk may exceed
    llm.close()
    results["close_s"] = time.perf_counter() - begun_s
    results["written_bytes"] = sum(p.stat().st_size for p in (folder / "prompts").rglob("*"))
    return results


def load(
    sizes: dict[str, Any], model: Path, folder: Path, is_cold: bool, length: int
) -> dict[str, Any]:
    """Be the restart: prefixes of one length come from the disk, and then from the pool."""
    from ostinato import LLM

    begun_s = time.perf_counter()
    llm = LLM(model, **settings(sizes, folder))
    results: dict[str, Any] = {"disk": [], "pool": [], "open_s": time.perf_counter() - begun_s}
    first_token_s(llm, prompt(sizes, 98, 64, "warm-up"))
    for path in () if is_cold else folder.rglob("*"):
        if path.is_file():
            path.read_bytes()  # a machine may have given up the page cache of files
    for number in range(NUM_PROMPTS if length == sizes["usual"] else 1):
        if is_cold:
            drop_from_page_cache(folder)
        took_s, origin = first_token_s(llm, prompt(sizes, number, length, "disk"))
        assert origin.get("disk", 0) == length, origin
        results["disk"].append(took_s)
        results["pool"].append(first_token_s(llm, prompt(sizes, number, length, "again"))[0])
    results["bytes_per_s"] = llm.engine.tiers.counts.load_bytes_per_s
    llm.engine.tiers.stop()  # nothing is new
    return results


def drop_from_page_cache(folder: Path) -> None:
    """Let the next read of every file come from the device."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def converse(sizes: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Hold the conversations of the peers' benchmark, with and without a disk by turns."""
    import torch

    common = {"num_blocks": sizes["chat_blocks"], "max_num_seqs": 32, "streamed": True}
    common |= {"kv_tokens": 0, "threads": torch.get_num_threads()}
    disk = {"kv_disk": folder / "chats", "kv_disk_bytes": 2**34}
    engines = {"without": Ours(), "with": Ours()}
    results: dict[str, Any] = {name: [] for name in engines}
    for name, engine in engines.items():
        engine.load(str(model), common | (disk if name == "with" else {}))
        engine.serve(conversations(sizes["vocab"], 1, 0))  # kernels compiled, memory touched
    for seed in range(1, 1 + sizes["chat_rounds"]):
        talks = conversations(sizes["vocab"], sizes["chat_turns"], seed)
        for name in sorted(engines, reverse=bool(seed % 2)):
            results[name].append(engines[name].serve(talks).seconds)
    stores = engines["with"].async_llm.engine.tiers.stores
    results["copied_bytes"] = stores.copied_bytes
    results["copy_s"], results["write_s"] = stores.copy_s, stores.write_s
    for engine in engines.values():
        asyncio.run(engine.async_llm.reset_prefix_cache())  # so that closing writes nothing
        engine.async_llm.shutdown()
    return results


def conversations(vocab_size: int, num_turns: int, seed: int) -> list[Talk]:
    """Draw the conversations of the peers' benchmark, with other turns for each seed."""
    draw = Draw(vocab_size, "turns", seed)
    system = draw(SIZES.system)
    return [talk(draw, system, num_turns, SIZES.turn, SIZES.answer) for _ in range(SIZES.chats)]


def report(
    computed: dict[str, Any],
    loaded: dict[str, Any],
    loaded_long: dict[str, Any],
    chats: dict[str, Any],
    sizes: dict[str, Any],
) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table("first token of", "computed", "pool", "disk", "disk : pool", "computed : disk")
    for length, by_model, restart in (
        (sizes["usual"], median(computed["computed"]), loaded),
        (sizes["long"], computed["computed_long"], loaded_long),
    ):
        by_pool, by_disk = median(restart["pool"]), median(restart["disk"])
        times = [f"{1e3 * seconds:,.1f} ms" for seconds in (by_model, by_pool, by_disk)]
        ratios = f"{by_disk / by_pool:.2f}", f"{by_model / by_disk:.1f}"
        table.add_row(f"{length:,} + {NUM_OWN} tokens", *times, *ratios)
    console = Console(width=110)
    console.print(table)
    console.print("Each of the loads, in ms: "
                  + ", ".join(f"{1e3 * s:.1f}" for s in loaded["disk"]))  # fmt: skip
    gib = computed["written_bytes"] / 2**30
    console.print(
        f"Closing wrote {gib:.2f} GiB in {computed['close_s']:.1f} s; the restart took "
        f"{loaded['open_s']:.1f} s, its loads {loaded['bytes_per_s'] / 2**30:.2f} GiB/s"
    )
    if not chats:
        return
    without, with_disk = chats["without"], chats["with"]
    pairs = [100 * (b / a - 1) for a, b in zip(without, with_disk, strict=True)]
    cpu_s = chats["copy_s"] + chats["write_s"]
    console.print(
        f"Conversations: {median(without):.2f} s without a disk, {median(with_disk):.2f} s with "
        f"one ({median(pairs):+.1f} % by pairs: {', '.join(f'{p:+.1f}' for p in pairs)}); "
        f"{chats['copied_bytes'] / 2**20:,.0f} MiB written, for which copying took "
        f"{chats['copy_s']:.2f} s and checking and writing {chats['write_s']:.2f} s of a "
        f"processor: {100 * cpu_s / (2 * sum(with_disk)):.2f} % of two"
    )


def run_part(part: str, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Run one part in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tiers", "--part", part, "--model", str(model)]
    command += ["--folder", str(folder), "--threads", str(options.threads)]
    command += ["--small"] * options.small + ["--cold"] * options.cold
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    if not options.small:
        touch_memory(min(options.touch_gib, available_gib() / 2))
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure, and print."""
    parser = parser_of(__doc__, threads=2)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cold", action="store_true", help="Read from the device.")
    parser.add_argument(
        "--touch-gib", type=float, default=9, help="memory written once before each restart"
    )
    parser.add_argument("--part", choices=("compute", "load", "load-long", "chat"))
    options = parser.parse_args()
    sizes: dict[str, Any] = {
        "vocab": 32_000, "usual": 2048, "long": 16_384, "chat_blocks": 1536, "chat_turns": 3,
        "chat_rounds": 3,
    }  # fmt: skip
    if options.small:
        sizes |= {"vocab": 512, "usual": 256, "long": 512, "chat_turns": 1, "chat_rounds": 1}
    if options.part is not None:
        import torch

        torch.set_num_threads(options.threads)
        args = sizes, options.model, options.folder
        if options.part == "compute":
            answer = compute_and_write(*args)
        elif options.part != "chat":
            length = sizes["usual" if options.part == "load" else "long"]
            answer = load(*args, options.cold, length)
        else:
            answer = converse(*args)
        print(json.dumps(answer))
        return
    with tempfile.TemporaryDirectory() as name:
        model = options.model or make_checkpoint(
            Path(name) / "model", SMALL if options.small else FULL
        )
        computed, loaded, loaded_long = (
            run_part(part, options, model, Path(name)) for part in PARTS
        )
        chats = {} if options.small else run_part("chat", options, model, Path(name))
        report(computed, loaded, loaded_long, chats, sizes)


if __name__ == "__main__":
    main()

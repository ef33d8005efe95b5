"""Starts a model twice, and prints the time, the processor time and the memory of each phase.

::

    python -m benchmarks.start FOLDER --shape qwen3-4b --gguf Q4_0
    python -m benchmarks.start model.gguf --tokens 1024

Each start is a process of its own, from the import to the first token, with a cache folder that is
empty the first time. Processor time is that of all threads: on a busy machine it is the one to
compare. Memory is what the kernel counts for the process; its own is anonymous, the rest is mapped,
and shared with all processes that have mapped it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command_line import markdown_table, parser_of
from benchmarks.peers.checkpoint import make_checkpoint, make_gguf
from benchmarks.peers.shapes import GGUF_TYPES, SHAPES

PHASES = ("imports", "model", "first token")
_SECONDS_PER_SAMPLE = 0.02


def start(model: str, dtype: str, tokens: int, settings: dict[str, Any]) -> None:
    """Start a model and print what its phases took, as JSON."""
    marks = [(time.perf_counter(), time.process_time())]
    from ostinato import LLM, SamplingParams

    marks.append((time.perf_counter(), time.process_time()))
    llm = LLM(model, dtype=dtype, block_size=16, num_blocks=-(-tokens // 16), **settings)
    marks.append((time.perf_counter(), time.process_time()))
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    marks.append((time.perf_counter(), time.process_time()))
    phases = {
        name: [after - before for before, after in zip(one, other, strict=True)]
        for name, one, other in zip(PHASES, marks, marks[1:], strict=False)
    }
    print(json.dumps({"phases": phases, "token": output.outputs[0].token_ids[0]}))


def measure(arguments: list[str], cache: Path) -> dict[str, Any]:
    """Run a start in a process of its own; returns its phases, token and peaks in bytes."""
    command = [sys.executable, "-m", "benchmarks.start", *arguments, "--once"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        own = total = 0
        while process.poll() is None:
            now = memory_of(process.pid)
            own, total = max(own, now.get("RssAnon", 0)), max(total, now.get("VmHWM", 0))
            time.sleep(_SECONDS_PER_SAMPLE)
        assert process.stdout is not None
        result: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return {**result, "own": own, "total": total}


def memory_of(pid: int) -> dict[str, int]:
    """Return what the kernel counts for a process, in bytes by name; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines if line.endswith(" kB")]
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}


def table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return a table of two starts: seconds, processor seconds, and peaks."""
    seconds = {name: first["phases"][name] + second["phases"][name] for name in PHASES}
    seconds["all"] = [sum(column) for column in zip(*seconds.values(), strict=True)]
    rows = [[f"{name}, s", *(f"{each:.1f}" for each in row)] for name, row in seconds.items()]
    for name, label in (("total", "peak, files included, GiB"), ("own", "peak, own, GiB")):
        rows.append([label, f"{first[name] / 2**30:.2f}", "", f"{second[name] / 2**30:.2f}", ""])
    return markdown_table(["", "first start", "CPU", "second start", "CPU"], rows)


def main() -> None:
    """Read the command line; measure, or start once."""
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="a model, or a folder to make one in")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--gguf", choices=GGUF_TYPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--tokens", type=int, default=1024, help="of keys and values")
    parser.add_argument("--keep", type=Path, help="cache folder that is left, empty at first")
    parser.add_argument("--once", action="store_true", help="start in this process")
    options = parser.parse_args()
    model = options.model
    if options.shape and options.gguf:
        model = make_gguf(model, options.shape, options.gguf)
    elif options.shape:
        model = make_checkpoint(model, SHAPES[options.shape])
    settings = {} if options.quantization is None else {"quantization": options.quantization}
    if options.once:
        return start(str(model), options.dtype, options.tokens, settings)
    arguments = [str(model), "--dtype", options.dtype, "--tokens", str(options.tokens)]
    if options.quantization is not None:
        arguments += ["--quantization", options.quantization]
    from ostinato.runner.checkpoints.fingerprints import SETTLED_NS  # not while a start imports

    time.sleep(SETTLED_NS / 1e9)  # what has just been written is not kept
    with tempfile.TemporaryDirectory(dir=model.parent) as cache:
        first, second = (measure(arguments, options.keep or Path(cache)) for _ in range(2))
    print(table(first, second))
    assert first["token"] == second["token"], "both starts give the same token"
    return None


if __name__ == "__main__":
    main()

"""Drafts of ours, vLLM and llama.cpp: milliseconds per token of one answer, each server at a time.

::

    python -m benchmarks.draft_servers FOLDER --peers PEERS
    python -m benchmarks.draft_servers FOLDER --columns ours vllm --scene edit --limit 4

SmolLM2 in bfloat16 answers the prompts of ``benchmarks.drafts`` greedily over HTTP, as it likes, so
that engines may write different answers. Time runs from the first event of a stream to the last;
prompts are not in it. Each server starts twice, without and with its drafts: ours with its default,
vLLM with ``ngram``, llama.cpp with ``ngram-simple`` and ``ngram-mod``, of which the faster counts.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.command_line import parser_of
from benchmarks.drafts import MAX_PROMPT, SCENES, talks
from benchmarks.peers.checkpoint import make_smollm2
from benchmarks.strangers import Scene, over_http

NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 4}'
FLAGS: dict[str, dict[str, list[str]]] = {
    "ours": {"off": ["--drafts", "off"], "default": []},
    "vllm": {"off": [], "ngram": ["--speculative-config", NGRAM]},
    "llamacpp": {
        "off": [],
        "ngram-simple": ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"],
        "ngram-mod": ["--spec-type", "ngram-mod"],
    },
}
"""What starts each server without drafts, and with each kind of them."""

Times = dict[str, list[float]]
"""Milliseconds per token of each answer, by scene."""


async def answer_times(
    server: str, flags: list[str], model: Path, given: argparse.Namespace
) -> Times:
    """Start a server, and ask one prompt after the other."""
    scene = Scene(long=MAX_PROMPT, stream_answer=given.tokens)
    options = argparse.Namespace(
        scene=scene, peers=given.peers, threads=os.cpu_count(), flags=flags
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    times: Times = {name: [] for name in given.scene}
    async with over_http(server, str(model), options) as (stream, _):
        for name in times:
            prompts = [talk.prompt for talk in talks() if talk.scene == name][: given.limit]
            for prompt in ["To be, or not to be", *prompts]:
                ids = tokenizer.encode(prompt, add_special_tokens=False).ids[-MAX_PROMPT:]
                moments = [time.perf_counter() async for _ in stream(ids, given.tokens, name)]
                times[name].append(1e3 * (moments[-1] - moments[0]) / (given.tokens - 1))
            del times[name][0]  # it warmed up
    return times


def main() -> None:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, help="where install.sh put the peers")
    parser.add_argument("--columns", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--scene", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each scene")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    given = parser.parse_args()
    model = make_smollm2(given.folder / "smollm2")
    table = Table("server", "drafts", "scene", "ms per token", "speed-up: median", "lowest")
    for server in given.columns:
        plain: Times = {}
        for kind, flags in FLAGS[server].items():
            times = asyncio.run(answer_times(server, flags, model, given))
            plain = plain or times
            for scene, own in times.items():
                gains = [off / on for off, on in zip(plain[scene], own, strict=True)]
                figures = (median(own), median(gains), min(gains))
                table.add_row(server, kind, scene, *(f"{number:.2f}" for number in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""Scores documents, compares choices and searches beams, with and without the cache, beside peers.

::

    python -m benchmarks.scoring FOLDER --documents 100 --peers-folder PEERS

Weights are random: what scores say means nothing, and they cost what they cost. Both engines of
ours run in this process, one after the other; the cached one begins empty, so the shared tokens are
computed. Without the cache each beam has a copy of the prompt's blocks, and reads its own.

vLLM has its prefix cache on, and computes documents by its ``embed``, which costs what its score
costs; its beams are requests of one token each. llama.cpp computes each document as a whole, as its
server's ``/rerank`` does. Each peer runs in its own process, and warms up with other tokens.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command_line import markdown_table, parser_of
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.engines import PEERS, environment_of, python_of
from benchmarks.peers.processes import WorkerFailed, WorkerProcess
from benchmarks.peers.shapes import SHAPES
from ostinato import LLM, BeamSearchParams

Question = dict[str, Any]


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call took."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def peer_seconds(
    name: str, folder: Path, model: Path, own: dict[str, Any], warm: Question, *questions: Question
) -> list[float]:
    """Ask a peer that was loaded with settings of its own; returns seconds per question."""
    engine = next(peer for peer in PEERS if peer.name == name)
    python, threads = python_of(engine, folder, {}), os.cpu_count() or 1
    if python is None:
        raise WorkerFailed(f"{name} is not installed in {folder}")
    settings = {
        "threads": threads, "kv_gib": 2, "kv_tokens": 16_384, "max_model_len": 16_384,
        "max_num_seqs": 128, **own,
    }  # fmt: skip
    environment, log = environment_of(engine, python, threads), Path(tempfile.mkstemp()[1])
    with WorkerProcess(engine.worker, python, environment, log) as worker:
        worker.ask({"do": "load", "model": str(model), "settings": settings}, 400)
        return [worker.ask(each, 400)["seconds"] for each in (warm, *questions)][1:]


def main() -> None:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in {
        "shared": 1000, "own": 200, "documents": 100, "beams": 32, "searched": 1000, "new": 16,
        "layers": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peers-folder", type=Path, help="where install.sh put the peers")
    parser.add_argument("--measures", default="documents,choices,beams")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="of which layers are")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    shape = replace(shape, sizes={**shape.sizes, "num_hidden_layers": given.layers})
    path = make_checkpoint(given.folder / f"scoring-{given.shape}-{given.layers}", shape)
    draw = random.Random(0).randrange

    def tokens(number: int) -> list[int]:
        return [draw(300, shape.vocab_size) for _ in range(number)]

    shared, other, searched = tokens(given.shared), tokens(given.shared), tokens(given.searched)
    beams = BeamSearchParams(beam_width=given.beams, max_tokens=given.new, ignore_eos=True)
    documents = [[*shared, *tokens(given.own)] for _ in range(given.documents)]
    choices = [tokens(8) for _ in range(4)]
    names = {
        "documents": f"{given.documents} documents of {given.own} tokens behind {given.shared}",
        "choices": f"4 choices behind {given.shared} tokens",
        "beams": f"{given.beams} beams of {given.new} tokens behind {given.searched}",
    }
    rows: dict[str, list[str]] = {each: [] for each in given.measures.split(",")}
    for is_cached in (True, False):
        llm = LLM(path, enable_prefix_caching=is_cached, num_blocks=4096 * 5)
        works: dict[str, Callable[[], object]] = {
            "documents": partial(llm.embed, documents, use_tqdm=False),
            "choices": partial(llm.choose, other, choices),
            "beams": partial(llm.beam_search, [searched], beams),
        }
        llm.embed([tokens(300)] * 4, use_tqdm=False)  # warm
        for name, row in rows.items():
            row.append(f"{seconds(works[name]):.2f}")
        llm.close()
    warm = tokens(given.own)
    embed: Question = {"do": "embed", "prompts": documents}
    search: Question = {"do": "search", "prompt": searched, "width": given.beams}
    search["num_outputs"] = given.new
    questions: dict[tuple[str, str], tuple[dict[str, Any], Question]] = {
        ("vllm", "documents"): ({"engine": {"runner": "pooling", "convert": "embed"}}, embed),
        ("llamacpp", "documents"): ({"pools": True}, embed),
        ("vllm", "beams"): ({"engine": {"max_logprobs": 2 * given.beams}}, search),
    }
    for peer in ("vllm", "llamacpp") if given.peers_folder else ():
        for name, row in rows.items():
            if (peer, name) not in questions:
                row.append("–")
                continue
            own, question = questions[peer, name]
            small: Question = {"prompts": [warm]} if name == "documents" else {"prompt": warm}
            try:
                [took] = peer_seconds(
                    peer, given.peers_folder, path, own, {**question, **small}, question
                )
                row.append(f"{took:.2f}")
            except WorkerFailed as error:
                row.append(str(error))
    peers = ["vLLM, s", "llama.cpp, s"] if given.peers_folder else []
    heads = ["", "cached, s", "no cache, s", *peers]
    print(markdown_table(heads, ([names[name], *row] for name, row in rows.items())))


if __name__ == "__main__":
    main()

"""Runs lm-evaluation-harness over HTTP on four choices per question, with and without the cache.

::

    python -m benchmarks.harness FOLDER PYTHON_WITH_LM_EVAL

The harness's ``local-completions`` sends each choice with the whole prompt and echoes it, one
request after the other. Seconds are the server's, from ``/metrics``: those of its own imports and
tokenizing are left out. Weights are random, so its accuracy means nothing.
"""

import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command_line import parser_of
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workers.http_client import free_port, running

TASK = """task: four_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


Question = dict[str, Any]
"""``context``, ``choices`` and the number of the ``answer``."""


def random_questions(count: int, length: int) -> list[Question]:
    """Return questions of random letters, each with four choices of a few."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=count)) + "x"

    return [
        {"context": text(length), "choices": [text(6) for _ in range(4)], "answer": 0}
        for _ in range(count)
    ]


def write_task(folder: Path, questions: list[Question]) -> None:
    """Write a task of the harness with its data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "four.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "four.yaml").write_text(TASK.format(data=folder / "four.jsonl"))


def served_figures(
    model: Path, task: Path, python: Path, *options: str
) -> tuple[float, float, float]:
    """Serve a model to the harness; returns requests, their seconds, and prompt tokens that hit."""
    port = free_port()
    command = [sys.executable, "-m", "ostinato.cli", "serve", str(model), "--port", str(port)]
    command += ["--served-model-name", model.name]
    url = f"http://127.0.0.1:{port}"
    with running([*command, *options], f"{url}/ready", stdout=subprocess.DEVNULL):
        evaluate(url, model, task, python)
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            rows = [row for row in answer.read().decode().splitlines() if row[:1] != "#"]

    def value(*parts: str) -> float:
        return sum(float(row.split()[-1]) for row in rows if all(part in row for part in parts))

    route, name = 'route="/v1/completions"', "ostinato_http_request_duration_seconds"
    hits = value("ostinato_route_prompt_tokens_total", route, 'result="hit"')
    return value(f"{name}_count", route), value(f"{name}_sum", route), hits


def evaluate(url: str, model: Path, task: Path, python: Path, packages: str = "") -> float:
    """Run the harness against a server, with a folder of its packages; returns its accuracy."""
    settings = {
        "model": model.name, "base_url": f"{url}/v1/completions", "tokenizer": model,
        "tokenizer_backend": "huggingface", "num_concurrent": 1, "max_length": 2048,
    }  # fmt: skip
    given = ",".join(f"{name}={value}" for name, value in settings.items())
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment = {**os.environ, **offline, "PYTHONPATH": packages, "HF_HOME": str(task / "hf")}
    words = ["-m", "lm_eval", "--model", "local-completions", "--tasks", "four_choices"]
    words += ["--include_path", str(task), "--model_args", given]
    results = task / "results"
    subprocess.run(
        [str(python), *words, "--output_path", str(results)], env=environment, check=True
    )
    newest = max(results.glob("**/results_*.json"), key=os.path.getmtime)
    return float(json.loads(newest.read_text())["results"]["four_choices"]["acc,none"])


def main() -> None:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("python", type=Path)
    for name, default in {"questions": 10, "length": 1000, "layers": 4, "hidden": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = {"num_hidden_layers": given.layers, "hidden_size": given.hidden}
    shape = replace(SHAPES["tiny"], sizes={**SHAPES["tiny"].sizes, **sizes})
    model = make_checkpoint(given.folder / f"scoring-{given.layers}-{given.hidden}", shape)
    write_task(given.folder / "task", random_questions(given.questions, given.length))
    print("| | requests | seconds | prompt tokens that hit |\n|---|--:|--:|--:|")
    for title, option in {"cached": (), "no cache": ("--no-enable-prefix-caching",)}.items():
        figures = served_figures(model, given.folder / "task", given.python, *option)
        print(f"| {title} | {figures[0]:.0f} | {figures[1]:.2f} | {figures[2]:,.0f} |", flush=True)


if __name__ == "__main__":
    main()

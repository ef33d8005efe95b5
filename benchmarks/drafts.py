"""What drafts gain, measured with a model.

::

    python -m benchmarks.drafts smollm2 --quantization int8
    python -m benchmarks.drafts smollm2 --batch 16

Answers are dictated, so acceptance depends on text alone: calls and edits of an agent that works on
files of this repository, whole files written anew with a name changed, and pages of the docs as
prose. Each step is computed with the model, by turns with and without drafts.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of
from ostinato import LLM, SamplingParams
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt

ROOT = Path(__file__).parents[1]
MAX_ANSWER, MAX_PROMPT = 200, 2_400
SCENES = ["agent", "edit", "prose"]


@dataclass(frozen=True)
class Talk:
    """One prompt and its dictated answer, as text."""

    scene: str
    prompt: str
    answer: str


def sources() -> list[tuple[str, str]]:
    """Files of this repository that an agent might edit."""
    paths = sorted((ROOT / "src/ostinato/scheduling").glob("*.py"))
    paths += sorted((ROOT / "src/ostinato/tenants").glob("*.py"))
    texts = ((str(path.relative_to(ROOT)), path.read_text()) for path in paths)
    return [(name, text[:6_000]) for name, text in texts if len(text) > 2_000][:10]


def call(name: str, **arguments: str) -> str:
    """A call as models of Qwen's kind write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent_talks() -> Iterator[Talk]:
    """Each call of sessions that read, edit and test one file after the other."""
    history = ""
    for number, (path, text) in enumerate(sources()):
        lines = text.splitlines()
        place = next(i for i, line in enumerate(lines) if line.startswith(("class ", "def ")))
        old, name = lines[place : place + 8], lines[place].split()[1].split("(")[0].strip(":")
        new = [line.replace(name, f"{name}V2") for line in old]
        history += f"\nUser: Rename {name} in {path} to {name}V2, and run its tests.\nAssistant: "
        steps = (
            (f"I will look for {name} first.\n" + call("bash", command=f"grep -rn '{name}' src/"),
             f"{path}:{place + 1}:{lines[place]}"),
            (call("view", path=path, view_range=f"[{place}, {place + 60}]"),
             "\n".join(lines[place - 1 : place + 60])),
            ("Now I will edit it.\n"
             + call("str_replace", path=path, old_str="\n".join(old), new_str="\n".join(new)),
             f"The file {path} has been edited."),
            ("Let me run the tests.\n" + call("bash", command=f"python -m pytest -q {path}"),
             "........ [100%]\n8 passed in 0.31s"),
        )  # fmt: skip
        for answer, result in steps:
            yield Talk("agent", history[-12_000:], answer)
            history += f"{answer}\nTool: {result}\nAssistant: "
        done = f"I renamed `{name}` to `{name}V2` in `{path}` and ran the tests: 8 passed."
        yield Talk("agent", history[-12_000:], done)
        history += done
        if number % 4 == 3:
            history = ""  # another session


def edit_talks() -> Iterator[Talk]:
    """Whole files written anew with one name changed, as some editing agents do."""
    for path, text in sources():
        definition = next(line for line in text.splitlines() if line.startswith(("class ", "def ")))
        name = definition.split()[1].split("(")[0].strip(":")
        question = f"Here is {path}:\n```python\n{text}```\nWrite it again with {name} renamed.\n"
        yield Talk("edit", question, f"```python\n{text.replace(name, name + '_2')[:1_600]}")


def prose_talks() -> Iterator[Talk]:
    """Pages of the docs, as answers that no text before them has."""
    for path in sorted((ROOT / "docs/decisions").glob("00[1-3]*.md"))[:10]:
        title, _, text = path.read_text().partition("\n")
        yield Talk("prose", f"Write about: {title}\n", text[:1_600])


def talks() -> list[Talk]:
    """All scenes."""
    return [*agent_talks(), *edit_talks(), *prose_talks()]


def ids_of(tokenizer: Any, talk: Talk) -> tuple[list[int], list[int]]:
    """Tokenize a prompt and its answer, apart, as a server and a model do."""
    prompt, answer = (
        list(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (talk.prompt, talk.answer)
    )
    return prompt[-MAX_PROMPT:], answer[:MAX_ANSWER]


class Dictation:
    """A constraint that allows one sequence of tokens."""

    error = ""
    allows_all = False

    def __init__(self, ids: list[int], num_bytes: int, place: int = 0) -> None:
        self._ids, self._num_bytes, self._place = ids, num_bytes, place

    @property
    def is_complete(self) -> bool:
        """Whether all of it was sampled."""
        return self._place >= len(self._ids)

    def copy(self) -> "Dictation":
        """Return another one at the same place."""
        return Dictation(self._ids, self._num_bytes, self._place)

    def mask(self) -> NDArray[np.uint8]:
        """Return a mask of the next token alone."""
        mask = np.zeros(self._num_bytes, dtype=np.uint8)
        token = self._ids[min(self._place, len(self._ids) - 1)]
        mask[token // 8] |= 1 << token % 8
        return mask

    def advance(self, token_id: int) -> None:
        """Go on to the next token."""
        self._place += 1


def decode_s(llm: LLM, batch: list[tuple[list[int], list[int]]]) -> tuple[float, list[Any]]:
    """Serve requests with dictated answers at once; returns seconds from the first tokens on."""
    engine = llm.engine
    num_bytes = -(-llm.engine.loaded.vocab_size // 32) * 4
    for prompt, answer in batch:
        params = SamplingParams(max_tokens=len(answer), temperature=0, detokenize=False)
        made = engine.make_request(Prompt(token_ids=prompt), params)
        constraint = Dictation(answer, num_bytes)
        engine.add(replace(made, request=replace(made.request, constraint=constraint)))
    outputs, begun_s, last = list[RequestOutput](), 0.0, None
    while engine.has_work:
        states = engine.step()
        outputs += [state.output() for state in states if state.finished]
        if last is None and not any(
            s.num_uncomputed > 1 for s in engine.scheduler.requests.running
        ):
            last, begun_s = True, time.perf_counter()
    return time.perf_counter() - begun_s, sorted(o.outputs[0].token_ids for o in outputs)


def measure(
    model: str, batch: int, limit: int, scenes: list[str], settings: dict[str, Any]
) -> Table:
    """Measure each scene with and without drafts, by turns."""
    table = Table("scene", "talks", "off: ms per token", "auto", "speed-up: median", "lowest",
                  "drafted", "right")  # fmt: skip
    common = {"num_blocks": 4_000, "max_num_seqs": max(batch, 1), **settings}
    engines = {mode: LLM(model, drafts=mode, **common) for mode in ("off", "auto")}
    tokenizer = engines["off"].get_tokenizer()
    pairs = [(talk.scene, ids_of(tokenizer, talk)) for talk in talks()]
    for scene in scenes:
        chosen = [pair for name, pair in pairs if name == scene and len(pair[1]) > 8][:limit]
        groups = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]
        times: dict[str, list[float]] = {"off": [], "auto": []}
        scheduler = engines["auto"].engine.scheduler
        before = scheduler.drafts.counts  # type: ignore[attr-defined]
        for number, group in enumerate(groups):
            answers = {}
            for mode in ("off", "auto") if number % 2 else ("auto", "off"):
                seconds, answers[mode] = decode_s(engines[mode], group)
                times[mode].append(seconds / max(len(answer) - 1 for _, answer in group))
            assert answers["off"] == answers["auto"], "drafts change nothing but time"
        counts = scheduler.drafts.counts  # type: ignore[attr-defined]
        drafted = sum(counts.drafted.values()) - sum(before.drafted.values())
        right = sum(counts.accepted.values()) - sum(before.accepted.values())
        ratios = [off / on for off, on in zip(times["off"], times["auto"], strict=True)]
        off_ms, on_ms = (1e3 * median(times[mode]) for mode in ("off", "auto"))
        table.add_row(
            scene, str(len(chosen)), f"{off_ms:.1f}", f"{on_ms:.1f}", f"{median(ratios):.2f}",
            f"{min(ratios):.2f}", str(drafted), f"{right / max(1, drafted):.0%}",
        )  # fmt: skip
    return table


def main() -> None:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--scene", choices=SCENES, action="append")
    parser.add_argument("--limit", type=int, default=10, help="talks of each scene")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    settings = {"quantization": given.quantization, "dtype": given.dtype}
    table = measure(given.model, given.batch, given.limit, given.scene or SCENES, settings)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

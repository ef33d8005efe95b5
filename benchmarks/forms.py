"""Cost of structured outputs: masks, steps and spreading masks over logits; no model.

::

    python -m benchmarks.forms                        # a vocabulary of 128,000 ids
    python -m benchmarks.forms --ids 32000 --json FILE

The vocabulary is made up: the 256 bytes, and words of one to nine letters with and without a space
before them, drawn at random. The text of each form is written letter by letter from the left, as
long as the form lets it: ids are drawn among those that are allowed.

``mask`` and ``advance`` are of one output and one token; ``spread`` is what the sampler does with
the masks of a batch, per row. All but the ids depends on the machine.
"""

import random
import time
from array import array
from collections.abc import Callable
from functools import partial
from statistics import fmean, quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of, write_json
from ostinato.core.plan import SampleTask, TokenConstraint
from ostinato.core.sampling_params import SamplingParams
from ostinato.engine.grammar.grammar import GrammarCompiler
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.runner.sampling.sampler import Sampler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputs(json=PERSON),
    "any object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"([A-Z][a-z]+ ){2,8}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choice of 3": StructuredOutputs(choice=["yes", "no", "perhaps"]),
}
MAX_TOKENS = 200
ROWS = (1, 64)


class Words:
    """A vocabulary of bytes and words, in the shape that ``TokenizerWrapper`` reads."""

    eos_token_id, bos_token_id = 0, None
    special_token_ids = (0,)

    def __init__(self, num_ids: int, rng: random.Random) -> None:
        """Draw the words."""
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        words = {bytes([value]) for value in range(256)}
        while len(words) < num_ids - 1:
            word = "".join(rng.choices(letters, k=rng.randint(1, 9)))
            words.add((rng.choice(["", " "]) + rng.choice([word, word.title()])).encode())
        self.tokens = [b"<eos>", *sorted(words)]
        self._ids = {token: number for number, token in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """Write a text byte by byte."""
        return [self._ids[bytes([byte])] for byte in text]


def make_compiler(num_ids: int, rng: random.Random) -> GrammarCompiler:
    """Return a compiler whose vocabulary is read already."""
    loaded: Any = SimpleNamespace(vocab_size=num_ids, eos_token_ids=(), tokenizer="made up")
    vocabulary = LLTokenizer(TokenizerWrapper(Words(num_ids, rng)), n_vocab=num_ids)
    with mock.patch("ostinato.engine.grammar.grammar.grammar_vocabulary", return_value=vocabulary):
        compiler = GrammarCompiler(loaded)
        compiler.compile(StructuredOutputs(choice=["a"]), "benchmark")
    return compiler


def measure(
    compiler: GrammarCompiler, wanted: StructuredOutputs, num_ids: int, rng: random.Random
) -> dict[str, float]:
    """Return what one form costs."""
    start_s = time.perf_counter()
    form = compiler.compile(wanted, "benchmark")
    compile_s = time.perf_counter() - start_s
    masks_s, steps_s = write(form.copy(), num_ids, rng)
    return {
        "tokens": len(masks_s),
        "compile_ms": 1e3 * compile_s,
        "mask_us": 1e6 * fmean(masks_s),
        "mask_p95_us": 1e6 * quantiles(masks_s, n=20)[-1] if len(masks_s) > 1 else 0.0,
        "advance_us": 1e6 * fmean(steps_s),
        **{f"spread_{rows}_us": spread(form, num_ids, rows) for rows in ROWS},
    }


def write(
    form: TokenConstraint, num_ids: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Write an output at random; returns the seconds of each mask and of each step."""
    masks_s: list[float] = []
    steps_s: list[float] = []
    while not form.is_complete and len(masks_s) < MAX_TOKENS:
        mask, seconds = timed(form.mask)
        masks_s.append(seconds)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:num_ids])
        token = int(rng.choice(allowed))
        steps_s.append(timed(partial(form.advance, token))[1])
    return masks_s, steps_s


def spread(form: TokenConstraint, num_ids: int, rows: int) -> float:
    """Return the microseconds per row beyond masks that a batch of such outputs costs."""
    params, none = SamplingParams(temperature=0.0), array("I")
    mask = form.mask()
    still: Any = SimpleNamespace(mask=lambda: mask)
    tasks = [SampleTask(params, (0,), none, none, constraint=still) for _ in range(rows)]
    logits, sampler = torch.zeros(rows, num_ids), Sampler()
    sampler.sample(logits, tasks)
    return 1e6 * min(timed(lambda: sampler.sample(logits, tasks))[1] for _ in range(5)) / rows


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what something gives, and the seconds that it took."""
    start_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start_s


def main() -> None:
    """Measure every form and print a table."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("--ids", type=int, default=128_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    compiler = make_compiler(options.ids, rng)
    figures = {name: measure(compiler, form, options.ids, rng) for name, form in FORMS.items()}
    columns = list(next(iter(figures.values())))
    table = Table("form", *(column.replace("_", " ") for column in columns))
    for name, row in figures.items():
        table.add_row(name, *(f"{row[column]:.1f}" for column in columns))
    Console().print(f"{options.ids} ids", table)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

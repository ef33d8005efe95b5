"""Options for reading a trace, and one line about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from ostinato.cli.options.config_source import load_config
from ostinato.cli.options.option_groups import option
from ostinato.core.config import check_minimum, one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.log.lines import BrokenLine, OnBroken
from ostinato.lab.size.image_tokens import image_tokens, read_size, tokens_of_log
from ostinato.lab.size.quantities import count, write_span
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.traces.hash_traces import TimeUnit
from ostinato.lab.traces.recording import Recording, read_recording
from ostinato.lab.traces.traces import ReadOptions, Tokenizer, is_recording, read_trace

_SHOWN_BROKEN = 5

TracePath = Annotated[
    Path,
    typer.Argument(
        help="An .npz trace, JSONL with hash_ids (Mooncake, Bailian), what record_trace wrote, or "
        "JSONL of requests; JSONL may be packed as .gz."
    ),
]
SkipBroken = Annotated[
    bool,
    typer.Option(
        "--skip-broken/--refuse-broken",
        help="Skip lines that cannot be read, and list them; or stop at the first.",
    ),
]


@dataclass(frozen=True)
class TraceOptions:
    """Options for reading a trace."""

    block_size: int | None = option(
        None,
        "Tokens per block, for recorded traces and logs; derived where a trace has hash_ids.",
        "--block-size",
        "-b",
    )
    skip_broken: SkipBroken = False
    tokenizer: str | None = option(None)
    """For logs of requests: the model whose tokenizer and chat template to use."""
    timestamp_unit: str = option("auto")
    """Of a trace with hash_ids: s, ms, us or ns; auto derives it from the rate of requests."""
    first: int | None = option(None)
    """Use only this many requests, from the start of the trace."""
    image: str = option("")
    """For logs of requests with images: their size, such as 1024x768; needs --model."""

    def open(self, path: Path, model: str | None) -> BlockTrace:
        """Read a trace, a log with the model's tokenizer, and list skipped lines on stderr.

        Raises:
            BrokenTrace: It cannot be read.
            ConfigError: A log of requests was given without a tokenizer, or the size of images
                for a model that takes none.
        """
        if self.block_size is not None:
            check_minimum("block_size", self.block_size, 1)
        if self.first is not None:
            check_minimum("first", self.first, 1)
        one_of("timestamp_unit", self.timestamp_unit, get_args(TimeUnit))
        name = self.tokenizer or model
        read = None if name is None else _tokenizer(name, self.image_tokens(model))
        unit = cast("TimeUnit", self.timestamp_unit)
        on_broken: OnBroken = "skip" if self.skip_broken else "refuse"
        options = ReadOptions(self.block_size, on_broken, read, unit)
        with Console(stderr=True).status(f"Reading {path.name} ..."):
            trace = read_trace(path, options)
        list_broken(trace.broken)
        return trace if self.first is None else trace.first(self.first)

    def image_tokens(self, model: str | None) -> int | None:
        """Return the number of tokens per image of a log; None if not requested.

        Raises:
            ConfigError: The model accepts no images, or is not named.
        """
        if not self.image:
            return None
        if model is None:
            raise ConfigError(f"image={self.image!r}: its tokens depend on the model: add --model")
        return image_tokens(load_config(model), *read_size(self.image))

    def recording(self, path: Path) -> Recording | None:
        """Read what an engine recorded, with its steps; None if a trace is of another kind.

        Raises:
            BrokenTrace: It cannot be read.
        """
        if not is_recording(path):
            return None
        return read_recording(path, "skip" if self.skip_broken else "refuse")


def list_broken(broken: Sequence[BrokenLine]) -> None:
    """List skipped lines on stderr, at most the first few."""
    console = Console(stderr=True)
    for line in broken[:_SHOWN_BROKEN]:
        console.print(f"line {line.number} left out: {line.reason}", style="yellow", markup=False)
    if len(broken) > _SHOWN_BROKEN:
        console.print(f"{count(len(broken), 'line')} left out in all", style="yellow")


def describe(trace: BlockTrace) -> str:
    """Describe a trace in one line."""
    return (
        f"{count(len(trace), 'request')} in {write_span(trace.duration_s)}, "
        f"{count(trace.total_input_tokens, 'prompt token')}, "
        f"{count(trace.num_lookups, 'block')} of {count(trace.block_tokens, 'token')}, "
        f"{trace.num_distinct:,} of them distinct"
    )


def _tokenizer(model: str, num_image_tokens: int | None = None) -> Tokenizer:
    """Return a function that tokenizes texts and conversations; the tokenizer loads lazily."""

    @cache
    def load() -> Any:
        # Imported here: other traces need no tokenizer, and its library loads torch.
        from ostinato.cli.options.tokenizer import model_tokenizer

        return model_tokenizer(model)

    def plain(text: str) -> list[int]:
        return list(load()(text, add_special_tokens=False, verbose=False)["input_ids"])

    def read(body: Mapping[str, Any]) -> list[int]:
        from ostinato.engine.prompts.chat import render_chat, render_text

        tokenizer, prompt = load(), body.get("prompt")
        if isinstance(prompt, str):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
        if num_image_tokens is not None:
            text = render_text(tokenizer, body["messages"], tools=body.get("tools"))
            return tokens_of_log(text, plain, num_image_tokens)
        return list(render_chat(tokenizer, body["messages"], tools=body.get("tools")))

    return read

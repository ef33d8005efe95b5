"""How is a text continued from a shell?"""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato.cli import _engine_options as options
from ostinato.cli._option_groups import grouped
from ostinato.cli._result_json import result_as_json
from ostinato.cli._sampling_options import IgnoreEos, SamplingOptions
from ostinato.cli._streaming import (
    account,
    follow,
    loaded,
    note,
    was_interrupted,
    write,
    write_prompt,
)
from ostinato.core.errors import ConfigError, EmptyPrompt, RequestError
from ostinato.engine.config import DEFAULT_MODEL
from ostinato.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ostinato import AsyncLLM, RequestOutput

_OUTPUT = "Output"
_REQUEST_ID = "generate"


@grouped
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing reads standard input.")
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    ignore_eos: IgnoreEos = False,
    n: Annotated[
        int,
        typer.Option("-n", help="Continuations of the one prompt.", rich_help_panel=_OUTPUT),
    ] = 1,
    echo: Annotated[
        bool,
        typer.Option(
            "--echo/--no-echo",
            help="Print the prompt before its continuation.",
            rich_help_panel=_OUTPUT,
        ),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print token ids, cached tokens, reasons and times as JSON.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities of each token and this many alternatives.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: the same of the prompt.", rich_help_panel=_OUTPUT),
    ] = None,
    *,
    sampling: SamplingOptions,
    engine: options.EngineOptions,
) -> None:
    """Continue a text, and say what it cost.

    The text goes to standard output while it is made, one line about tokens and times to standard
    error. Of piped text, one line break at the end is not part of the prompt. Ctrl-C stops early
    and keeps what there is.

    Try: ostinato generate "ROMEO:" --seed 1
    """
    text = _read(prompt)
    params = sampling.params(
        n=n, ignore_eos=ignore_eos, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    _check_shown(params, as_json)
    settings = engine.settings(model)
    with loaded(model, settings) as llm:
        output = _generate(llm, text, params, _page(text, echo) if n == 1 and not as_json else None)
    if as_json:
        typer.echo(json.dumps(result_as_json(model, output), indent=2))
    else:
        _finish(output, echo)
    if was_interrupted(output):
        raise KeyboardInterrupt


def _read(prompt: str | None) -> str:
    """Return the text to continue.

    Raises:
        EmptyPrompt: There is none.
        RequestError: It is no text.
    """
    try:
        text = _read_stdin() if prompt in (None, "-") else prompt
        text.encode()
    except UnicodeError as error:
        raise RequestError(f"the prompt is not UTF-8: {error}") from error
    if not text:
        raise EmptyPrompt("the prompt is empty: give a text, or pipe one in")
    return text


def _read_stdin() -> str:
    """Read standard input to its end, and drop one line break there, as shells do."""
    if sys.stdin.isatty():
        note("Type a text; Ctrl-D on a new line ends it.")
    return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")


def _check_shown(params: SamplingParams, as_json: bool) -> None:
    """Refuse what would be computed and not shown."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not as_json:
            raise ConfigError(f"{name}={value} is printed as JSON alone: add --json")


def _page(prompt: str, echo: bool) -> Callable[[str], None]:
    """Return what shows the continuation, with the prompt before its first piece."""
    waiting = [prompt] if echo else []

    def show(piece: str) -> None:
        if waiting:
            write_prompt(waiting.pop())
        write(piece)

    return show


def _generate(
    llm: "AsyncLLM", prompt: str, params: SamplingParams, show: Callable[[str], None] | None
) -> "RequestOutput":
    """Run the request, showing it live if wanted."""
    outputs = llm.generate(prompt, params, request_id=_REQUEST_ID)
    if show is not None:
        return follow(llm, outputs, _REQUEST_ID, show)
    with Console(stderr=True).status("Generating ..."):
        return follow(llm, outputs, _REQUEST_ID, lambda piece: None)


def _finish(output: "RequestOutput", echo: bool) -> None:
    """End the text, or print all of several, and say what it cost."""
    if len(output.outputs) == 1:
        write("\n")
    else:
        for completion in output.outputs:
            Console().rule(f"{completion.index + 1} of {len(output.outputs)}", align="left")
            if echo:
                write_prompt(output.prompt or "")
            write(f"{completion.text}\n")
    note(account(output))

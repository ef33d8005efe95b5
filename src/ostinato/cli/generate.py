"""``ostinato generate``: continues a text."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ostinato.cli.models import KNOWN_MODELS
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.output.streaming import (
    follow,
    loaded,
    note,
    summary,
    was_interrupted,
    write,
    write_prompt,
)
from ostinato.cli.output.tables import attributes, print_json
from ostinato.cli.replay import replay_record
from ostinato.core.errors import ConfigError, EmptyPrompt, RequestError
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL

if TYPE_CHECKING:
    from ostinato import CompletionOutput, RequestOutput
    from ostinato.engine.requests.outputs import Logprob

_OUTPUT = "Output"
_REQUEST_ID = "generate"


def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; - or nothing reads standard input, and so does the name of a "
            "model of 'ostinato models', which then is used."
        ),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    ignore_eos: bool = option(
        False, "Continue beyond the end-of-sequence token.", "--ignore-eos", panel="Sampling"
    ),
    n: int = option(1, "Number of continuations.", "-n", panel=_OUTPUT),
    echo: bool = option(
        True, "Print the prompt before its continuation.", "--echo/--no-echo", panel=_OUTPUT
    ),
    as_json: bool = option(
        False, "Print token ids, cached tokens, reasons and times as JSON.", "--json", panel=_OUTPUT
    ),
    logprobs: int | None = option(
        None,
        "With --json: log-probabilities of each token and this many alternatives.",
        panel=_OUTPUT,
    ),
    prompt_logprobs: int | None = option(
        None, "With --json: the same for prompt tokens.", panel=_OUTPUT
    ),
    lora: str | None = option(None, "Directory of a LoRA adapter to use.", panel="LoRA adapters"),
    *,
    sampling: options.SamplingOptions,
    engine: options.EngineOptions,
) -> None:
    """Continue a text, and print statistics.

    The text is streamed to standard output, and one line about tokens and times goes to standard
    error. One line break at the end of piped text is dropped. Ctrl-C stops early and keeps the text
    so far.

    Try: ostinato generate "ROMEO:" --seed 1
    """
    if prompt in KNOWN_MODELS and model == DEFAULT_MODEL:
        from ostinato.runner.checkpoints.model_resolver import resolve_model

        model = prompt
        prompt = None
        resolve_model(model)
    text = _read(prompt)
    params = sampling.params(
        n=n, ignore_eos=ignore_eos, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    _check_shown(params, as_json)
    if lora is not None:
        engine["enable_lora"] = True
    EngineConfig.of(model, engine)
    with loaded(model, engine) as llm:
        from ostinato import LoRARequest

        adapter = None if lora is None else LoRARequest(lora, 1, lora)
        params = sampling.fill(params, llm.engine.defaults)
        outputs = llm.generate(text, params, request_id=_REQUEST_ID, lora_request=adapter)
        if n == 1 and not as_json:
            output = follow(llm, outputs, _REQUEST_ID, _page(text, echo))
        else:
            with Console(stderr=True).status("Generating ..."):
                output = follow(llm, outputs, _REQUEST_ID, lambda piece: None)
        replay = replay_record(llm, params) if as_json and lora is None else None
    if as_json:
        print_json({**_as_json(model, output), "replay": replay})
    else:
        _finish(output, echo)
    if was_interrupted(output):
        raise KeyboardInterrupt


def _read(prompt: str | None) -> str:
    """Return the text to continue.

    Raises:
        EmptyPrompt: There is none.
        RequestError: It is not UTF-8.
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
    """Read standard input to its end, without its last line break."""
    if sys.stdin.isatty():
        note("Type a text; Ctrl-D on a new line ends it.")
    return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")


def _check_shown(params: SamplingParams, as_json: bool) -> None:
    """Refuse options whose results would not be printed."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not as_json:
            raise ConfigError(f"{name}={value} is only printed as JSON: add --json")


def _page(prompt: str, echo: bool) -> Callable[[str], None]:
    """Return a function that prints the continuation, after the prompt."""
    waiting = [prompt] if echo else []

    def show(piece: str) -> None:
        if waiting:
            write_prompt(waiting.pop())
        write(piece)

    return show


def _finish(output: "RequestOutput", echo: bool) -> None:
    """End the text, or print several continuations, then print statistics."""
    if len(output.outputs) == 1:
        write("\n")
    else:
        for completion in output.outputs:
            Console().rule(f"{completion.index + 1} of {len(output.outputs)}", align="left")
            if echo:
                write_prompt(output.prompt or "")
            write(f"{completion.text}\n")
    note(summary(output))


def _as_json(model: str, output: "RequestOutput") -> dict[str, object]:
    """Return a result as plain values; durations in seconds, or null."""
    timings = output.timings
    counts = ("num_cached_tokens", "cached_tokens_from", "num_copied_tokens")
    return {
        "model": model,
        **attributes(output, "prompt", "prompt_token_ids", *counts),
        "outputs": [_completion(completion) for completion in output.outputs],
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "seconds": {
            "queue": timings.queue_time,
            "prefill": timings.prefill_time,
            "first_token": timings.time_to_first_token,
            "decode": timings.decode_time,
            "total": timings.total_time,
        },
    }


def _completion(completion: "CompletionOutput") -> dict[str, object]:
    text = attributes(completion, "index", "text", "token_ids")
    ending = attributes(completion, "finish_reason", "stop_reason", "cumulative_logprob")
    return {**text, **ending, "logprobs": _logprobs(completion.logprobs)}


def _logprobs(
    positions: "Sequence[dict[int, Logprob] | None] | None",
) -> list[list[dict[str, object]] | None] | None:
    """Return one list per position, with the token itself first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else [
            {
                "token_id": token_id,
                "token": each.decoded_token,
                **attributes(each, "logprob", "rank"),
            }
            for token_id, each in position.items()
        ]
        for position in positions
    ]

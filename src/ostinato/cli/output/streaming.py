"""Streams an answer to the terminal, with a line of statistics.

Ctrl-C stops the answer, not the program: the engine cancels the request between two steps and
releases its blocks, and the text so far is kept.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ostinato.errors import StepFailed
from ostinato.lab.size.quantities import count, write_seconds

if TYPE_CHECKING:
    from ostinato import AsyncLLM, RequestOutput

_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {code: 0xFFFD for code in range(0x7F, 0xA0)}


def write(text: str) -> None:
    """Write text to stdout unchanged and unbuffered.

    On a terminal, control characters are escaped: a model must not move the cursor.
    """
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_prompt(text: str) -> None:
    """Write like ``write``, in bold on a terminal."""
    bold = sys.stdout.isatty() and not Console().is_dumb_terminal
    sys.stdout.write("\x1b[1m" if bold else "")
    write(text)
    sys.stdout.write("\x1b[0m" if bold else "")


def note(text: str) -> None:
    """Print a note on stderr; terminals wrap it between words."""
    console = Console(stderr=True)
    console.print(
        text, style="dim", markup=False, highlight=False, soft_wrap=not console.is_terminal
    )


def follow(
    llm: "AsyncLLM",
    outputs: "AsyncIterator[RequestOutput]",
    request_id: str,
    show: Callable[[str], None],
) -> "RequestOutput":
    """Wait for the end of a request, and show each new piece of its first continuation.

    Returns:
        The last output; after Ctrl-C with ``finish_reason="abort"``.

    Raises:
        RequestError: The request was refused.
        StepFailed: A forward pass raised.
    """
    pressed = threading.Event()

    def cancel() -> None:
        pressed.set()
        llm.abort(request_id)

    async def wait() -> "RequestOutput":
        with _on_ctrl_c(cancel):
            return await read()

    async def read() -> "RequestOutput":
        shown, output = "", None
        async for output in outputs:
            _show_more(output, shown, show)
            shown = output.outputs[0].text
            if pressed.is_set() and not output.finished:
                llm.abort(request_id)  # an earlier call may precede the request
        assert output is not None, "a request has at least one output"
        return output

    return asyncio.run(wait())


def _show_more(output: "RequestOutput", shown: str, show: Callable[[str], None]) -> None:
    """Show the new part of a text, or print the error."""
    if output.error is not None:
        if shown:
            show("\n")
        raise StepFailed(output.error, [output])
    show(output.outputs[0].text[len(shown) :])


def was_interrupted(output: "RequestOutput") -> bool:
    """Return whether Ctrl-C stopped any continuation."""
    return any(completion.finish_reason == "abort" for completion in output.outputs)


def summary(output: "RequestOutput") -> str:
    """Return one line: tokens reused and generated, and speed."""
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    words = [
        f"{count(len(output.prompt_token_ids), 'prompt token')}, "
        f"{output.num_cached_tokens:,} cached"
        + "".join(
            f" ({tokens:,} from {tier})"
            for tier, tokens in output.cached_tokens_from.items()
            if tier != "pool"
        )
        + (f", {output.num_kept_tokens:,} kept as generated" if output.num_kept_tokens else ""),
        f"{num_generated:,} generated",
    ]
    timings = output.timings
    if timings.time_to_first_token is not None:
        words.append(f"first after {write_seconds(timings.time_to_first_token)}")
    decoded = num_generated - len(output.outputs)
    if timings.decode_time and decoded > 0:
        words.append(f"then {decoded / timings.decode_time:.0f}/s")
    return " | ".join(words)


@contextmanager
def loaded(model: str, settings: dict[str, Any]) -> "Iterator[AsyncLLM]":
    """Load a model with settings of ``EngineConfig``, and stop the engine's thread afterwards.

    Raises:
        ModelError: The model cannot be served.
    """
    with Console(stderr=True).status(f"Loading {model} ..."):
        from ostinato import AsyncLLM

        llm = AsyncLLM(model, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


@contextmanager
def _on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Handle Ctrl-C by a function instead of ``KeyboardInterrupt``, for a while.

    The running event loop calls it: a signal wakes the loop even if it is about to block.
    """
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, action)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

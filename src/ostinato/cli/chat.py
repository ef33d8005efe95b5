"""``ostinato chat``: a conversation, one line per turn."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ostinato.cli._errors import print_error
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.output.streaming import follow, loaded, note, summary, was_interrupted, write
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.errors import ConfigError, RequestError, StepFailed
from ostinato.lab.size.quantities import count

if TYPE_CHECKING:
    from ostinato import AsyncLLM, RequestOutput


class ChatSession:
    """A conversation's messages, and the model.

    Attributes:
        messages: Messages in order, for the chat template.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        params: SamplingParams,
        system: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Start with the system prompt, if there is one."""
        self._llm = llm
        self._params = params
        self._system = system
        self._chat_template = chat_template
        self._num_turns = 0
        self.messages: list[dict[str, str]]
        self.reset()

    def reset(self) -> None:
        """Start again; the cache is kept."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def answer(self, line: str) -> bool:
        """Answer a line on stdout, and print statistics on stderr.

        Returns:
            Whether the answer is complete. After Ctrl-C a partial answer stays in the conversation;
            a line without any answer is removed.
        """
        self.messages.append({"role": "user", "content": line})
        try:
            output = self._ask()
        except (RequestError, StepFailed) as error:
            print_error(str(error))
            self._remove_last()
            note("/reset starts a new one")
            return True
        return self._keep(output)

    def _ask(self) -> "RequestOutput":
        """Show the answer while it is generated."""
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        outputs = self._llm.chat(
            self.messages,
            self._params,
            chat_template=self._chat_template,
            request_id=request_id,
        )
        return follow(self._llm, outputs, request_id, write)

    def _keep(self, output: "RequestOutput") -> bool:
        """Add an answer to the conversation."""
        write("\n")
        interrupted, text = was_interrupted(output), output.outputs[0].text
        if text or not interrupted:
            self.messages.append({"role": "assistant", "content": text})
        note(summary(output) + (" | stopped" if interrupted else ""))
        if interrupted and not text:
            self._remove_last()
        return not interrupted

    def _remove_last(self) -> None:
        """Remove the last line from the conversation."""
        self.messages.pop()
        note("that line was removed from the conversation")


_COMMANDS = {
    "/help": "this list",
    "/reset": "start a new conversation; the cache is kept",
    "/stats": "counters of the cache",
    "/quit": "quit, like Ctrl-D",
}
_CTRL_C = "Ctrl-C stops an answer; Ctrl-D or /quit quits"
_STOP_STRINGS: dict[str, tuple[str, ...]] = {DEFAULT_MODEL: ("\n\n",)}
"""Stop strings of models that never end their answers."""


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as with --model.")
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    system: str | None = option(None, "System prompt of the conversation.", "--system", "-s"),
    chat_template: Path | None = option(
        None, "A file with a Jinja chat template, for models that have none."
    ),
    *,
    sampling: options.SamplingOptions,
    engine: options.EngineOptions,
) -> None:
    """Chat with a model; every turn prints what it reused.

    A turn's prompt is the whole conversation so far; all of it but the newest message is cached.
    Ctrl-C stops an answer and keeps the conversation, Ctrl-D quits, /help lists commands.
    Lines may also be piped in, one per turn. Try: ostinato chat smollm2
    """
    model = name or model
    params = sampling.params(_STOP_STRINGS.get(model, ()))
    EngineConfig.of(model, engine)
    template = None if chat_template is None else _read(chat_template)
    with loaded(model, engine) as llm:
        params = sampling.fill(params, llm.engine.defaults)
        _converse(ChatSession(llm, params, system, template), llm, model)


def _read(chat_template: Path) -> str:
    """Return a chat template.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return chat_template.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"chat_template={str(chat_template)!r} cannot be read: {error}"
        ) from error


def _converse(conversation: ChatSession, llm: "AsyncLLM", model: str) -> None:
    """Read lines and answer them, to the end of input."""
    if _is_interactive():
        note(f"This is {model}. {_CTRL_C}; /help lists commands.")
    for line in _typed_lines("you: ", _CTRL_C):
        try:
            if line.strip() == "/quit":
                return
            _take(line, conversation, llm)
        except KeyboardInterrupt:  # just after the end of the answer
            if not _is_interactive():
                raise


def _take(line: str, conversation: ChatSession, llm: "AsyncLLM") -> None:
    """Run a command or answer a line.

    Raises:
        KeyboardInterrupt: Ctrl-C stopped the answer.
    """
    command = line.strip()
    if command == "/reset":
        conversation.reset()
        note("a new conversation")
    elif command == "/stats":
        note(_stats(llm))
    elif command == "/help":
        Console(stderr=True).print(_help(), style="dim")
    elif command.startswith("/"):
        note(f"there is no {command}; /help lists commands")
    elif command and not conversation.answer(line):
        raise KeyboardInterrupt


def _help() -> Table:
    table = Table.grid(padding=(0, 2))
    for command, purpose in _COMMANDS.items():
        table.add_row(command, purpose)
    return table


def _stats(llm: "AsyncLLM") -> str:
    """Return the cache's counters since the start, as a sentence."""
    stats = llm.cache_stats
    looked_up = stats.first
    return (
        f"{count(looked_up.num_requests, 'turn')}: {looked_up.hit_tokens:,} of "
        f"{count(looked_up.query_tokens, 'prompt token')} were cached "
        f"({looked_up.hit_ratio:.1%}); {count(stats.published_blocks, 'block')} published, "
        f"{stats.evicted_blocks:,} evicted"
    )


def _is_interactive() -> bool:
    """Return whether input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _typed_lines(prompt: str, hint: str) -> Iterator[str]:
    """Yield lines until the end of input; at a terminal, that is Ctrl-D on an empty line.

    Args:
        prompt: Shown at a terminal.
        hint: Shown at a terminal after Ctrl-C, which drops the line that is being typed.

    Raises:
        KeyboardInterrupt: Ctrl-C without a terminal.
        RequestError: A line is not UTF-8.
    """
    if not _is_interactive():
        yield from _piped_lines()
        return
    shown = _prompt(prompt)
    while True:
        try:
            print()
            line = input(shown)
        except KeyboardInterrupt:
            print()
            note(hint)
            continue
        except EOFError:
            print()
            return
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error}") from error


def _prompt(text: str) -> str:
    """Make a prompt bold; ``input`` edits lines and keeps a history once readline is loaded."""
    if Console().is_dumb_terminal:
        return text
    try:
        import readline
    except ImportError:  # not on every platform; typing works without it
        return f"\x1b[1m{text}\x1b[0m"
    readline.set_auto_history(True)
    # Between \x01 and \x02: characters of zero width.
    return f"\x01\x1b[1m\x02{text}\x01\x1b[0m\x02"

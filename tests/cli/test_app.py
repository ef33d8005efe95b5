"""The command line as a whole: help, version, and how commands end."""

import subprocess
import sys

import pytest
import typer

import ostinato
from ostinato.cli import _errors
from ostinato.core.errors import ConfigError
from tests.cli.terminal import Terminal

IN_ORDER = ("demo", "generate", "chat", "size", "savings")


def test_help_lists_the_commands_in_the_order_of_a_newcomer_s_way(terminal: Terminal):
    """First what shows something, then what computes with numbers."""
    text = terminal.show("--help")
    lines = [line.strip("│ ").split("  ")[0] for line in text.splitlines()]
    listed = [line for line in lines if line in IN_ORDER]

    assert {"size", "savings"} <= set(listed)
    assert listed == [name for name in IN_ORDER if name in listed]


def test_no_arguments_show_the_help(terminal: Terminal):
    assert "Commands" in terminal.run().output


def test_the_version_is_the_package_s(terminal: Terminal):
    assert terminal.show("--version") == f"ostinato {ostinato.__version__}\n"


def test_an_unknown_command_is_refused(terminal: Terminal):
    result = terminal.run("sing")

    assert result.exit_code == 2
    assert "sing" in result.stderr


def test_what_needs_no_model_loads_no_tensor_library():
    """Torch takes seconds, the libraries of the network a while; the answers come at once."""
    program = (
        "import sys\n"
        "from ostinato.cli import main\n"
        "for line in sys.stdin:\n"
        "    sys.argv = ['ostinato', *line.split()]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as leaving:\n"
        "        code = leaving.code\n"
        "    slow = {'torch', 'transformers', 'huggingface_hub', 'numpy.random'}\n"
        "    print(code, slow & set(sys.modules), file=sys.stderr)\n"
    )
    calls = ["--help", "generate To-be --max-tokens 0", "chat --help", "size tiny-shakespeare"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(calls), capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.endswith("set()")]
    assert said == ["0 set()", "2 set()", "0 set()", "0 set()"]


def failing(error: BaseException) -> typer.Typer:
    """A command line whose one command raises."""
    broken = typer.Typer(cls=_errors.CommandGroup, pretty_exceptions_enable=False)

    @broken.callback()
    def root() -> None:
        """Make it a group of commands."""

    @broken.command()
    def fail() -> None:
        raise error

    return broken


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            ConfigError("num_blocks=0: [bold]must[/bold] be\nat least 1 " + "and more " * 30),
            2,
            "num_blocks=0: [bold]must[/bold] be at least 1 " + "and more " * 29 + "and more",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "this is a bug in Ostinato: ZeroDivisionError: division by zero "
            "(OSTINATO_TRACEBACK=1 shows where)",
        ),
    ],
)
def test_a_command_that_fails_ends_with_one_line_and_a_code(
    error, code, text, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What the user can mend is 2, however long its line; Ctrl-C is 130; our own mistake is 1."""
    monkeypatch.setattr(sys, "argv", ["ostinato", "fail"])
    with pytest.raises(SystemExit) as leaving:
        _errors.run(failing(error))
    assert (leaving.value.code, capsys.readouterr().err) == (code, f"error: {text}\n")


@pytest.mark.parametrize("error", [ConfigError("no"), KeyError("oops")])
def test_a_traceback_is_shown_to_those_who_ask(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """The error itself leaves the command line, so that Python prints where it was raised."""
    monkeypatch.setenv("OSTINATO_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["ostinato", "fail"])

    with pytest.raises(type(error)):
        _errors.run(failing(error))

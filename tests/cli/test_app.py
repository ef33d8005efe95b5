"""The command line as a whole: help, version, and how commands end."""

import subprocess
import sys

import pytest
import typer

import ostinato
from ostinato.cli import _errors, app
from ostinato.core.errors import ConfigError

from .terminal import Terminal

IN_ORDER = ("demo", "generate", "chat", "size", "savings")


def test_help_lists_the_commands_in_the_order_of_a_newcomer_s_way(terminal: Terminal):
    """First what shows something, then what computes with numbers."""
    text = terminal.show("--help")
    lines = [line.strip("│ ").split("  ")[0] for line in text.splitlines()]
    listed = [line for line in lines if line in IN_ORDER]

    assert {"size", "savings"} <= set(listed)
    assert listed == [name for name in IN_ORDER if name in listed]


def test_every_command_has_help_that_fits_its_screen(terminal: Terminal):
    """Each explains itself within 80 columns."""
    for name in ("size", "savings"):
        text = terminal.show(name, "--help")
        assert f"Usage: ostinato {name}" in text
        assert max(len(line) for line in text.splitlines()) <= 80


def test_no_arguments_show_the_help(terminal: Terminal):
    assert "Commands" in terminal.run().output


def test_the_version_is_the_package_s(terminal: Terminal):
    assert terminal.show("--version") == f"ostinato {ostinato.__version__}\n"


def test_an_unknown_command_is_refused(terminal: Terminal):
    result = terminal.run("sing")

    assert result.exit_code == 2
    assert "sing" in result.stderr


def test_starting_the_command_line_loads_no_tensor_library():
    """Help must appear at once; torch takes seconds, and the network's libraries a while."""
    program = (
        "import sys\n"
        "from ostinato.cli import main\n"
        "sys.argv = ['ostinato', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as leaving:\n"
        "    assert leaving.code == 0\n"
        "print({'torch', 'transformers', 'huggingface_hub', 'numpy.random'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("set()\n")
    assert "savings" in done.stdout


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


def ending(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Exit code and stderr of a command that raises."""
    monkeypatch.setattr(sys, "argv", ["ostinato", "fail"])
    with pytest.raises(SystemExit) as leaving:
        _errors.run(failing(error))
    return leaving.value.code, capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """However long it is, and whatever brackets are in it."""
    error = ConfigError("num_blocks=0: [bold]must[/bold] be\nat least 1 " + "and more " * 30)
    code, text = ending(error, monkeypatch, capsys)

    assert code == 2
    assert text.startswith("error: num_blocks=0: [bold]must[/bold] be at least 1 and more")
    assert text.count("\n") == 1


def test_ctrl_c_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As shells expect of an interrupted command."""
    assert ending(KeyboardInterrupt(), monkeypatch, capsys) == (130, "error: interrupted\n")


def test_a_mistake_of_ours_says_so_and_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Exit code 1, apart from what the user can mend."""
    code, text = ending(ZeroDivisionError("division by zero"), monkeypatch, capsys)

    assert code == 1
    assert "ZeroDivisionError: division by zero" in text
    assert "OSTINATO_TRACEBACK=1" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("error", [ConfigError("no"), KeyError("oops")])
def test_a_traceback_is_shown_to_those_who_ask(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """The error itself leaves the command line, so that Python prints where it was raised."""
    monkeypatch.setenv("OSTINATO_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["ostinato", "fail"])

    with pytest.raises(type(error)):
        _errors.run(failing(error))


def test_the_installed_script_starts_what_is_tested_here():
    """``[project.scripts]`` names ``ostinato.cli:main``."""
    assert callable(ostinato.cli.main)
    assert isinstance(app, typer.Typer)

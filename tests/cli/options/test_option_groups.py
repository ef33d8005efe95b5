"""Options that several commands take have one home."""

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ostinato.cli.options.engine_options import SamplingOptions
from ostinato.cli.options.option_groups import grouped, option
from ostinato.engine.requests.sampling_params import SamplingParams
from tests.cli.terminal import Terminal


@dataclass(frozen=True)
class Weather:
    wind: Annotated[int, typer.Option("--wind", "-w", help="How strong.")] = 3
    is_wet: Annotated[bool, typer.Option("--wet/--dry")] = False
    waves: int = option(1)
    """How high."""


@dataclass(frozen=True)
class Climate(Weather):
    zone: str = option("", "Where.", "--zone", "-z")


def run(*arguments: str):
    app = typer.Typer()

    @app.command()
    @grouped
    def sail(ship: str, crew: int = 2, *, weather: Climate) -> None:
        """Sail."""
        typer.echo(f"{ship} {crew} {weather.wind} {weather.is_wet}")

    return CliRunner().invoke(app, arguments)


def test_a_group_of_options_comes_to_a_command_as_one_value():
    """The docstring of a field is its help, of those that it inherits as well."""
    assert run("Bounty").stdout == "Bounty 2 3 False\n"
    assert run("Bounty", "--wet", "-w", "9", "--crew", "4").stdout == "Bounty 4 9 True\n"
    assert run("Bounty", "--wind", "strong").exit_code == 2
    shown = run("--help").stdout
    assert {text in shown for text in ("Sail.", "How strong.", "How high.", "Where.")} == {True}


def test_an_option_of_two_groups_is_a_mistake_of_ours():
    def sail(wind: int = 1, *, weather: Weather) -> None:
        raise AssertionError

    with pytest.raises(AssertionError, match="wind is in two groups"):
        grouped(sail)


def test_options_of_sampling_are_named_as_its_parameters_are():
    known = {parameter.name for parameter in fields(SamplingParams)}
    assert {option.name for option in fields(SamplingOptions)} <= known
    assert SamplingOptions().params(("\n\n",)).stop == ("\n\n",)
    assert SamplingOptions(stop=["x"]).params(("\n\n",)).stop == ("x",)


@pytest.mark.parametrize("command", [["generate", "To be"], ["chat"], ["serve"]])
def test_how_a_step_is_computed_may_be_said_to_each_command_with_an_engine(
    terminal: Terminal, command: list[str]
):
    for flag in ("--attention", "--forward", "--read-once", "--kv-cache-dtype"):
        said = terminal.refuse(*command, flag, "sometimes")
        assert f"{flag.strip('-').replace('-', '_')}='sometimes': must be one of" in said

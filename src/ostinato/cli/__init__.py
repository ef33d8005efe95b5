"""The command line: one file per subcommand, assembled here.

A subcommand is a module with a function ``run``: its docstring is the help text, its
parameters are the arguments and options. It is added to ``_COMMANDS``, in the order of the
help text.

Files in reading order:

* ``demo``, ``generate``, ``chat``: run a model in the shell
* ``replay``: computes logged answers again
* ``serve``: serves a model over HTTP
* ``route``: routes requests to many engines
* ``explain``, ``lint``: why prompts miss, and how to fix it
* ``size``, ``savings``, ``simulate``, ``plan``: what caching costs and saves
* ``models``, ``cache``, ``keys``: fetch models, administer a running server and its API keys
* ``labs``: writes and checks the labs
* ``output/``: tables, plots and streams of text
* ``options/``: options that several commands share
* ``demonstration/``: the traffic and the examples of ``demo``

Files that begin with an underscore are shared by these.

Rules:

1. Starting loads no torch: what needs tensors is imported inside ``run``.
2. Commands raise; ``_errors`` alone turns errors into a line on stderr and an exit code.
3. Options that several commands take are groups, see ``options/option_groups``: each has one home.
4. Every setting of an engine, a server and a router is an option, with the name, default and help
   of its field.
"""

import os
from typing import Annotated

import typer

import ostinato
from ostinato.cli import (
    _errors,
    cache,
    chat,
    demo,
    explain,
    generate,
    keys,
    labs,
    lint,
    models,
    plan,
    replay,
    route,
    savings,
    serve,
    simulate,
    size,
)
from ostinato.cli.options import option_groups as _option_groups

_COMMANDS = (
    demo, generate, replay, chat, serve, explain, lint, size, savings, simulate, plan
)  # fmt: skip
_GROUPS = (route, models, cache, keys, labs)
"""Modules with several commands, in an ``app`` of their own."""

app = _option_groups.GroupedTyper(
    cls=_errors.CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in _COMMANDS:
    app.command(_module.__name__.rpartition(".")[2])(_module.run)
for _module in _GROUPS:
    app.add_typer(_module.app, name=_module.__name__.rpartition(".")[2])


def main() -> None:
    """Run the command line; never returns."""
    ostinato.limit_spinning(os.environ)
    _errors.run(app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ostinato {ostinato.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """An LLM inference engine in which no prefix is computed twice."""

"""``ostinato labs``: eight labs in which a prefix cache is built and serves a model."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli.options.option_groups import GroupedTyper, option
from ostinato.cli.output.tables import Field, Figure, print_json, table_of
from ostinato.core.config import check_minimum
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.labs.course import LABS, lab_of, write_labs
from ostinato.labs.grading import grade, verdict_text
from ostinato.labs.real_layer import LAYER_S
from ostinato.plugins.child import run_limited

EXIT_NOT_YET = 3

_LABS = (
    Figure("Lab", "number"),
    Field("You build", "title"),
    Figure("Minutes", "minutes"),
    Field("File", "file", is_whole=True),
)
_VERDICTS = (
    Figure("Lab", "lab"),
    Field("", "passed", lambda passed: "passed" if passed else "not yet", is_whole=True),
    Figure("Checks", lambda verdict: f"{verdict.num_passed}/{verdict.num_checks}"),
    Field("First mistake", "kind"),
)

app = GroupedTyper(
    invoke_without_command=True,
    help="Build a prefix cache in eight labs; each ends with your code serving a model.",
)

_Number = Annotated[int, typer.Argument(help=f"Number of a lab, 1 to {len(LABS)}.")]
_FOLDER = "Folder that 'ostinato labs new' has written; by default here, or ./labs."


@app.callback()
def _list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_labs()


def list_labs() -> None:
    """Show the labs and where to begin."""
    console = Console(highlight=False)
    console.print(table_of(LABS, _LABS))
    steps = {
        "ostinato labs new labs": "writes all eight into ./labs",
        "ostinato labs check 1": "says what is right and what is not, with an example",
        "ostinato labs check --all": "does so for each; --json for teachers",
        "ostinato labs solution 1": "prints a solution",
    }
    width = max(map(len, steps))
    for command, purpose in steps.items():
        console.print(Text(f"  {command:{width}}", style="cyan").append(f"  {purpose}", "default"))


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="Folder to write; made if need be.")]) -> None:
    """Write the eight labs: a page, a file with holes and a check each."""
    places = write_labs(folder)
    first = LABS[0]
    typer.echo(f"Wrote {len(places)} labs into {folder}. Each has a page, a file with holes and a")
    typer.echo("check. Begin with")
    typer.echo(f"\n    {folder / first.folder / 'README.md'}\n")
    typer.echo(f"fill the holes of {first.name}.py beside it, and run")
    where = "" if folder == Path("labs") else f" --folder {folder}"
    typer.echo(f"\n    ostinato labs check 1{where}")


@app.command()
def check(
    number: Annotated[
        int | None, typer.Argument(help=f"Number of a lab, 1 to {len(LABS)}.")
    ] = None,
    folder: Path | None = option(None, _FOLDER),
    file: Path | None = option(None, "Another file to check in place of the lab's own."),
    every: bool = option(False, "Check all labs.", "--all"),
    as_json: bool = option(False, "Print the results as JSON.", "--json"),
) -> None:
    """Check a lab's file; says what is wrong with the smallest example.

    The exit code is 0 if all is right, and 3 if not.
    """
    if every == (number is not None):
        raise ConfigError("labs check: give the number of a lab, or --all")
    if every and file is not None:
        raise ConfigError(f"file={str(file)!r} with --all: give the number of its lab")
    labs = LABS if number is None else (lab_of(number),)
    root = Path() if file is not None else _root(folder)
    verdicts = [grade(lab, file or root / lab.file) for lab in labs]
    if as_json:
        print_json(verdicts)
    elif every:
        Console(highlight=False).print(table_of(verdicts, _VERDICTS))
    else:
        typer.echo(verdict_text(labs[0], verdicts[0]))
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(EXIT_NOT_YET)


@app.command()
def solution(number: _Number) -> None:
    """Print a solution of a lab."""
    typer.echo(lab_of(number).solution, nl=False)


@app.command()
def traffic(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "http://127.0.0.1:8000",
    num_calls: int = option(200, "Calls to send.", "--calls"),
    prefixes: int = option(1, "Shared prefixes; more than one need more memory."),
    at_once: int = option(8, "Calls that are under way at once."),
) -> None:
    """Send the demo's calls to the server of a lab, and compare its hits with Ostinato's own."""
    from ostinato.cli.demonstration import lab_traffic

    check_minimum("calls", num_calls, 1)
    check_minimum("prefixes", prefixes, 1)
    check_minimum("at_once", at_once, 1)
    texts = lab_traffic.prompts(num_calls, prefixes)
    with Console(stderr=True).status("Sending ...") as status:
        lab_traffic.send(
            url, texts, at_once, lambda done: status.update(f"{done} of {len(texts)} answered")
        )
    both = lab_traffic.hits(url)
    if both is None:
        typer.echo(f"{len(texts)} calls answered. Index, eviction policy, order and routing are")
        typer.echo("Ostinato's own here, so there are no two shares of hits to compare.")
        return
    typer.echo(f"{both['requests']} calls answered; share of prompt tokens that hit:")
    typer.echo(f"  {both['own_ratio']:7.1%}  with {', '.join(both['names'])}")
    typer.echo(f"  {both['built_in_ratio']:7.1%}  with Ostinato's own in its place")
    if both["faults"]:
        typer.echo(f"  {both['faults']} answers of your class could not be used: see the log")


@app.command()
def layer(
    file: Annotated[Path, typer.Argument(help="Your read_once.py.")],
    model: str = option(DEFAULT_MODEL, "Model whose first layer is computed."),
) -> None:
    """Compute one layer of a real model with your attention, over the engine's block tables."""
    from ostinato.cli.demonstration.captured_layer import NUM_SEQUENCES, capture

    lab = lab_of(6)
    verdict = grade(lab, file)
    if not verdict.passed:
        typer.echo(verdict_text(lab, verdict))
        raise typer.Exit(EXIT_NOT_YET)
    with Console(stderr=True).status(f"Loading {model} ..."), TemporaryDirectory() as folder:
        captured, arrays = capture(model), Path(folder) / "layer.npz"
        captured.save(arrays)
        function = "ostinato.labs.real_layer:attend_here"
        result = run_limited(function, [str(file), str(arrays)], LAYER_S)
    if not isinstance(result, dict) or "error" in result:
        why = result["error"] if isinstance(result, dict) else result
        raise ConfigError(f"file={str(file)!r}: attend fails on a real layer: {why}")
    typer.echo(
        f"One layer of {model}, {NUM_SEQUENCES} sequences of up to {captured.num_tokens} tokens:"
    )
    own = result["num_read"]
    typer.echo(f"  blocks in tables     {captured.num_table_blocks:5}")
    typer.echo(f"  read by your plan    {own:5}, by the engine's own plan {captured.num_read}")
    typer.echo(
        f"  largest difference {result['difference']:.1e}, over {result['num_heads']} heads, to "
        "attention of each sequence alone"
    )


def check_folder(root: Path, number: int) -> None:
    """Check a lab in a folder of labs, print the result, and end the process with its code."""
    lab = lab_of(number)
    verdict = grade(lab, root / lab.file)
    typer.echo(verdict_text(lab, verdict))
    raise SystemExit(0 if verdict.passed else EXIT_NOT_YET)


def _root(folder: Path | None) -> Path:
    """Return the folder of the labs.

    Raises:
        ConfigError: There are none.
    """
    places = [folder] if folder is not None else [Path(), Path("labs"), Path("..")]
    for place in places:
        if any((place / lab.folder).is_dir() for lab in LABS):
            return place
    where = folder if folder is not None else "this folder, ./labs and .."
    raise ConfigError(
        f"there are no labs in {where}: `ostinato labs new labs` writes them, --folder "
        "names another folder"
    )

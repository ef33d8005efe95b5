"""The one printer of all commands: tables from lists of columns, progress bars, and JSON.

A table cuts no figure: columns that are too many for the terminal follow in a second part.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

_NATURAL = 1000
"""Columns in which any cell has room."""
_FOLDED = 20
"""Columns that are enough for a word that may be folded."""

Cell = Callable[[Any], object]
"""Turns a row, or a value, into what is shown of it."""


def written(value: object) -> object:
    """Write a value: ``12,345``, ``yes``, or ``-`` for none; others stay as they are."""
    if value is None or isinstance(value, bool):
        return "yes" if value else "-"
    return f"{value:,}" if isinstance(value, int) else value


share = "{:.1%}".format
"""Writes a ratio in per cent."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column of words: its heading, and what it shows of a row.

    Attributes:
        heading: Heading.
        value: Key or attribute of a row, or a function of it.
        write: How the value is written.
        footer: Text below the rows.
        is_whole: Whether it is never broken into lines.
    """

    heading: str
    value: str | Cell
    write: Cell = written
    footer: str = ""
    is_whole: bool = False
    is_figure: ClassVar[bool] = False

    def cell(self, row: Any) -> object:
        """Return what it shows of a row: ``Text``, so that brackets are no markup."""
        if callable(self.value):
            value = self.value(row)
        else:
            value = row[self.value] if isinstance(row, Mapping) else getattr(row, self.value)
        shown = self.write(value)
        return Text(shown) if isinstance(shown, str) else shown


@dataclass(frozen=True, slots=True)
class Figure(Field):
    """A column of figures, aligned at the right."""

    is_figure: ClassVar[bool] = True


def figures(**names: str) -> Iterator[Figure]:
    """Walk columns of figures by heading, with ``_`` for a blank: ``Looked_up="query_tokens"``."""
    return (Figure(heading.replace("_", " "), name) for heading, name in names.items())


def table_of(
    rows: Iterable[Any],
    fields: Iterable[Field],
    style: Callable[[Any], str] = lambda row: "",
    *,
    has_rule: bool = False,
    is_tight: bool = False,
) -> "FigureTable":
    """Return a table with a line for each row and a column for each field.

    Args:
        rows: Objects or mappings.
        fields: Columns, in order.
        style: Style of a row's line.
        has_rule: Whether only the heading is ruled off, and nothing else is drawn.
        is_tight: Whether two cells share the blanks between them.
    """
    fields = list(fields)
    table = FigureTable(has_rule, any(field.footer for field in fields), is_tight)
    for field in fields:
        table.add_column(
            field.heading,
            field.footer,
            justify="right" if field.is_figure else "left",
            overflow="fold",
            no_wrap=field.is_whole,
        )
    for row in rows:
        table.add_row(*(field.cell(row) for field in fields), style=style(row))  # type: ignore[arg-type]
    return table


def matrix(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    is_whole: bool = False,
    **style: Any,
) -> "FigureTable":
    """Return a ruled table of rows of cells: a column of words, then columns of figures.

    Args:
        headings: One per column.
        rows: Cells of each row.
        is_whole: Whether words are never broken into lines.
        **style: Further arguments of `table_of`.
    """
    columns = [Figure(heading, itemgetter(place)) for place, heading in enumerate(headings)]
    first = Field(headings[0], itemgetter(0), is_whole=is_whole)
    return table_of(rows, [first, *columns[1:]], has_rule=True, **style)


def progress_at(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a progress bar that leaves nothing behind, and is shown at a terminal alone."""
    hidden = console.quiet or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with progress_at(Console(stderr=True), *columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda steps: progress.advance(task, steps)


def attributes(source: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by their names, as plain values for JSON."""
    return {name: getattr(source, name) for name in names}


def print_json(value: object, *, is_ascii: bool = True) -> None:
    """Print values and dataclasses as indented JSON; ``is_ascii`` escapes other letters."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=is_ascii, default=asdict))


class FigureTable(Table):
    """A table whose words and figures are whole; each part repeats the first column."""

    def __init__(
        self, has_rule: bool = False, show_footer: bool = False, is_tight: bool = False
    ) -> None:
        """Create a table without columns.

        Args:
            has_rule: Whether only the heading is ruled off, and nothing else is drawn.
            show_footer: Whether columns have footers.
            is_tight: Whether two cells share the blanks between them.
        """
        drawn = box.SIMPLE_HEAD if has_rule else box.SIMPLE
        super().__init__(box=drawn, pad_edge=False, header_style="bold", show_footer=show_footer)
        self.collapse_padding = is_tight

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render one part after another; where room is short, figures take what they need."""
        natural = Measurement.get(console, options.update_width(_NATURAL), self).maximum
        if natural <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        widths = [_min_width(column, console, options) for column in self.columns]
        gap = 2 if self.collapse_padding else 3
        for places in _parts([width + gap for width in widths], options.max_width):
            part = copy(self)
            part.columns = [
                replace(
                    self.columns[place],
                    _index=index,
                    min_width=widths[place],
                    width=widths[place] if self.columns[place].justify == "right" else None,
                )
                for index, place in enumerate(places)
            ]
            yield from Table.__rich_console__(part, console, options)


def _min_width(column: Column, console: Console, options: ConsoleOptions) -> int:
    """Return the width of the longest word of a column, or line if it does not wrap.

    A word that may be folded, such as a path, needs less.
    """
    texts = (column.header, column.footer, *column.cells)
    wide = options.update_width(_NATURAL)
    sizes = [Measurement.get(console, wide, text) for text in texts]
    longest = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    if column.overflow == "fold" and not column.no_wrap:
        longest = min(longest, _FOLDED)
    return max(longest, column.min_width or 0)


def _parts(widths: list[int], max_width: int) -> Iterator[list[int]]:
    """Divide columns into parts that fit; the first column begins each."""
    part, used = [0], widths[0]
    for place, width in enumerate(widths[1:], 1):
        if len(part) > 1 and used + width > max_width:
            yield part
            part, used = [0], widths[0]
        part.append(place)
        used += width
    yield part

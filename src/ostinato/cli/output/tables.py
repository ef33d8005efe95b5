"""Tables that cut no figure: columns that are too many for the terminal follow in a second part."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_NATURAL = 1000
"""Columns in which any cell has room."""


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
    """Return the width of the longest word of a column, or line if it does not wrap."""
    texts = (column.header, column.footer, *column.cells)
    wide = options.update_width(_NATURAL)
    sizes = [Measurement.get(console, wide, text) for text in texts]
    longest = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
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

"""Writes plots, tables and text to one HTML page.

The file is self-contained: plots are inline SVG, and there is no script.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from ostinato.lab.simulate.plots import as_svg

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #22223b; background: #faf9fd;
       margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.2rem 5rem; }
h1 { font-weight: 650; letter-spacing: -.01em; margin: 0 0 .2rem; }
h2 { font-weight: 600; margin: 2.8rem 0 .6rem; }
p { max-width: 46rem; } .faint { color: #6c6c80; }
figure { margin: 1rem 0; padding: .6rem; background: #fff; border: 1px solid #e3e3ea;
         border-radius: .6rem; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; background: #fff; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e3e3ea; }
td { white-space: nowrap; } th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #b9b9c9; }
""".strip()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and what stands below it, in order."""

    title: str
    parts: Sequence[str | Table | Figure]


def write_report(title: str, subtitle: str, sections: Iterable[Section]) -> str:
    """Return a page of HTML; text is escaped."""
    body = "\n".join(map(_section, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="faint">{escape(subtitle)}</p>\n{body}\n'
        "</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = "\n".join(map(_part, section.parts))
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{parts}\n</section>"


def _part(part: str | Table | Figure) -> str:
    if isinstance(part, Figure):
        return f"<figure>{as_svg(part)}</figure>"
    if isinstance(part, Table):
        head = "".join(f"<th>{escape(heading)}</th>" for heading in part.headings)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in part.rows
        )
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div>"
        )
    return f"<p>{escape(part)}</p>"

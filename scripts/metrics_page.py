"""Writes the table of metrics in ``docs/observing.md`` from the figures in the code.

::

    python scripts/metrics_page.py

It stands between the lines ``<!-- metrics -->`` and ``<!-- end -->``.
"""

import re
from pathlib import Path

from ostinato.server.telemetry import engine_figures, request_figures
from ostinato.server.telemetry.figures import figures_table

PAGE = Path(__file__).parents[1] / "docs/observing.md"
_TABLE = re.compile(r"(<!-- metrics -->\n).*?(<!-- end -->\n)", re.DOTALL)


def with_table(page: str) -> str:
    """Return the page with the table as the code has it."""
    table = figures_table([*request_figures.FIGURES, *engine_figures.FIGURES])
    return _TABLE.sub(lambda m: f"{m[1]}\n{table}\n\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

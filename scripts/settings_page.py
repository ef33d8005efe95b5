"""Writes the tables of ``docs/settings.md`` from the settings in the code.

::

    python scripts/settings_page.py

A line ``<!-- settings: NAME -->`` begins the tables of a class, and ``<!-- end -->`` ends them.
"""

import re
from pathlib import Path

from ostinato.cli.options.setting_texts import settings_table
from ostinato.engine.settings.settings import EngineSettings
from ostinato.router.process.config import FleetConfig
from ostinato.server.config import ServerConfig

PAGE = Path(__file__).parents[1] / "docs/settings.md"
KINDS = {kind.__name__: kind for kind in (EngineSettings, ServerConfig, FleetConfig)}
_TABLES = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables as the code has them."""
    return _TABLES.sub(lambda m: f"{m[1]}\n{settings_table(KINDS[m[2]])}\n\n{m[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

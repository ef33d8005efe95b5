"""Writes the tables of ``docs/settings.md`` from the settings in the code.

::

    python scripts/settings_page.py

A line ``<!-- settings: NAME -->`` begins the tables of a class, and ``<!-- end -->`` ends them.
"""

import re
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from ostinato.cli.options.setting_texts import (
    about,
    is_bytes,
    setting_texts,
    with_choices,
    write_exactly,
)
from ostinato.core.setting import choices_of, setting_fields
from ostinato.engine.settings.settings import EngineSettings
from ostinato.router.process.config import FleetConfig
from ostinato.server.config import ServerConfig

PAGE = Path(__file__).parents[1] / "docs/settings.md"
KINDS = {kind.__name__: kind for kind in (EngineSettings, ServerConfig, FleetConfig)}
_TABLES = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables as the code has them."""
    return _TABLES.sub(lambda m: f"{m[1]}\n{settings_table(KINDS[m[2]])}\n\n{m[3]}", page)


def settings_table(kind: type) -> str:
    """Return the rows of a dataclass's settings in Markdown, with a heading for each group."""
    groups: dict[str, list[str]] = {}
    for name, known in setting_fields(kind).items():
        groups.setdefault(about(known).group, []).append(_row(kind, name))
    head = "| Setting | Default | Range | Meaning |\n|---|---|---|---|\n"
    in_order = sorted(groups.items(), key=lambda group: not group[0])
    return "\n\n".join(
        f"### {group or 'Python alone'}\n\n{head}" + "\n".join(rows) for group, rows in in_order
    )


def _row(kind: type, name: str) -> str:
    known = setting_fields(kind)[name]
    text = with_choices(setting_texts(kind)[name], choices_of(known))
    page = about(known).page
    cell = f"[`{name}`]({page})" if page else f"`{name}`"
    meaning = text.replace("``", "`").replace("|", "\\|")
    return f"| {cell} | `{_default(known)}` | {about(known).limits} | {meaning} |"


def _default(known: "Field[Any]") -> str:
    default: Any = known.default
    if default is MISSING:
        default = known.default_factory() if callable(known.default_factory) else "none"
    return write_exactly(default) if default and is_bytes(known) else repr(default)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

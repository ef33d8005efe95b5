"""Draws which room imports which, in ``CONTRIBUTING.md``, from the code.

::

    python scripts/import_picture.py

A room stands above all that it imports. Behind it are the rooms that it imports and reaches through
no other. Names of the last release, which only forward, are left out, as in the contract
``layers``.
"""

import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
_PICTURE = re.compile(r"(<!-- imports: from the code -->\n).*?(<!-- end -->\n)", re.DOTALL)


def imports_of_rooms() -> dict[str, set[str]]:
    """Return the rooms, and the other rooms that each imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {
        contract["id"]: contract for contract in settings["tool"]["importlinter"]["contracts"]
    }
    graph = grimp.build_graph("ostinato")
    for line in contracts["layers"]["ignore_imports"]:
        importer, _, imported = line.partition(" -> ")
        graph.remove_import(importer=importer, imported=imported)
    rooms = {module.split(".")[1]: set[str]() for module in graph.find_children("ostinato")}
    for module in graph.modules - {"ostinato"}:
        room = module.split(".")[1]
        for imported in graph.find_modules_directly_imported_by(module):
            rooms[room] |= set(imported.split(".")[1:2]) - {room}
    files = {"errors", "former_names", "inputs", "ray", "sampling_params", "settings"}
    return {room: imports - files for room, imports in rooms.items() if room not in files}


def picture() -> str:
    """Return one line per room, the rooms that import most above."""
    rooms = imports_of_rooms()
    below: dict[str, set[str]] = {}
    height: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        below[room] = rooms[room].union(*(below[other] for other in rooms[room]))
        height[room] = max((height[other] + 1 for other in rooms[room]), default=0)
    width = max(map(len, rooms))
    lines = []
    for room in sorted(rooms, key=lambda room: (-height[room], room)):
        others = rooms[room] - set[str]().union(*(below[other] for other in rooms[room]))
        names = " ".join(sorted(others, key=lambda other: (-height[other], other)))
        lines.append(f"{room:{width}} ──► {names}" if names else room)
    return "\n".join(lines)


def with_picture(page: str) -> str:
    """Return the page with the picture as the code has it."""
    return _PICTURE.sub(lambda m: f"{m[1]}\n```text\n{picture()}\n```\n\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The labs, their holes, and the folders that ``ostinato labs new`` writes.

A solution marks its holes by two comments; the file of a lab is the solution without what is
between them::

    # Hole 2 (A chain of digests): a digest of the parent's digest and the tokens.
    return sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
    # End of hole 2.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from ostinato.core.errors import ConfigError

_HOLE = re.compile(
    r"^(?P<indent> *)# Hole (?P<number>\d+) \((?P<section>[^)]+)\): (?P<task>.+?)\n"
    r"(?P<more>(?:(?P=indent)# (?!End of hole).+\n)*)"
    r"(?P<code>(?:.*\n)*?)"
    r"(?P=indent)# End of hole (?P=number)\.$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a lab's file that is to be written.

    Attributes:
        number: From 1 on.
        section: Heading of the page to read.
        task: What to write there, in a few sentences.
    """

    number: int
    section: str
    task: str


@dataclass(frozen=True, slots=True)
class Lab:
    """One lab.

    Attributes:
        number: From 1 on.
        name: Of its file, without a suffix.
        title: In a few words.
        minutes: What it takes.
        serve: The command that runs it for real, with ``{file}`` for the file.
        traffic: The command that then sends it the demo's calls; empty if it needs none.
    """

    number: int
    name: str
    title: str
    minutes: int
    serve: str
    traffic: str = "ostinato labs traffic"

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.number:02}_{self.name}"

    @property
    def file(self) -> str:
        """Path of its file below the folder of all labs."""
        return f"{self.folder}/{self.name}.py"

    @property
    def solution(self) -> str:
        """Text of the solution."""
        return _read("solutions", f"{self.name}.py")

    @property
    def page(self) -> str:
        """Text of its page."""
        return _read("pages", f"{self.folder}.md")

    @property
    def notebook(self) -> str | None:
        """Its notebook, if it has one."""
        entry = files("ostinato.labs").joinpath("pages", f"{self.folder}.ipynb")
        return entry.read_text("utf-8") if entry.is_file() else None

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The holes of its file."""
        return tuple(
            Hole(int(hole["number"]), hole["section"], _task(hole))
            for hole in _HOLE.finditer(self.solution)
        )

    @property
    def template(self) -> str:
        """Text of the file with holes."""
        return _HOLE.sub(_empty, self.solution)

    def hole(self, number: int) -> Hole:
        """Return a hole by its number."""
        return next(hole for hole in self.holes if hole.number == number)

    @property
    def required(self) -> dict[str, list[str]]:
        """Public functions and classes of the file, each with its public methods."""
        return defined_names(self.solution)


_SERVE = "ostinato serve tiny-shakespeare --num-blocks 512 "

LABS = (
    Lab(1, "blocks", "Hash blocks and a chain of digests", 45, _SERVE + "--index {file}:HashIndex"),
    Lab(2, "radix", "A radix tree that splits its edges", 60, _SERVE + "--index {file}:Index"),
    Lab(
        3,
        "eviction",
        "Reference counts, least recently used, leaves first",
        45,
        "ostinato serve tiny-shakespeare --num-blocks 96 --eviction-policy {file}:Policy",
        "ostinato labs traffic --prefixes 6",
    ),
    Lab(4, "tails", "Tails, and copy on write", 45, _SERVE + "--index {file}:Index"),
    Lab(
        5,
        "step",
        "A scheduler's step: chunks, budget, preemption",
        60,
        "ostinato serve tiny-shakespeare --num-blocks 96 --max-num-seqs 8 --order {file}:Ranking",
        "ostinato labs traffic --prefixes 6 --at-once 32",
    ),
    Lab(6, "read_once", "Read a shared prefix once", 60, "ostinato labs layer {file}", ""),
    Lab(
        7,
        "router",
        "A router that weighs hits against load",
        45,
        "ostinato route --worker URL --worker URL --policy {file}:Policy",
        "ostinato labs traffic http://127.0.0.1:8080 --prefixes 4",
    ),
    Lab(
        8,
        "explain",
        "Why it missed",
        45,
        _SERVE + "--explainer {file}:explain",
    ),
)


def lab_of(number: int) -> Lab:
    """Return a lab by its number.

    Raises:
        ConfigError: There is none.
    """
    for lab in LABS:
        if lab.number == number:
            return lab
    raise ConfigError(f"lab {number}: there are labs 1 to {len(LABS)}")


def write_labs(folder: Path) -> list[Path]:
    """Write all labs into a folder that has none of them; return the new folders.

    Raises:
        ConfigError: One of them is there already; then nothing is written.
    """
    there = [lab.folder for lab in LABS if (folder / lab.folder).exists()]
    if there:
        raise ConfigError(
            f"{folder / there[0]} exists, and a new lab never overwrites your work: choose another "
            "folder"
        )
    for lab in LABS:
        place = folder / lab.folder
        place.mkdir(parents=True)
        (place / "README.md").write_text(lab.page, "utf-8")
        (place / f"{lab.name}.py").write_text(lab.template, "utf-8")
        (place / "check.py").write_text(_CHECK.format(number=lab.number), "utf-8")
        if lab.notebook is not None:
            (place / f"{lab.name}.ipynb").write_text(lab.notebook, "utf-8")
    return [folder / lab.folder for lab in LABS]


_CHECK = '''"""Checks lab {number}: the same as ``ostinato labs check {number}``."""

from pathlib import Path

from ostinato.cli.labs import check_folder

check_folder(Path(__file__).parent.parent, {number})
'''


def unfilled_holes(text: str, lab: Lab) -> list[Hole]:
    """Return the holes of a lab's file in which nothing but a placeholder stands."""
    left = {int(hole["number"]) for hole in _HOLE.finditer(text) if _is_empty(hole["code"])}
    return [hole for hole in lab.holes if hole.number in left]


def defined_names(text: str) -> dict[str, list[str]]:
    """Return public functions and classes of a file, each with its public methods."""
    names: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            body = node.body if isinstance(node, ast.ClassDef) else []
            methods = [each.name for each in body if isinstance(each, ast.FunctionDef)]
            names[node.name] = [name for name in methods if not name.startswith("_")]
    return names


def _task(hole: "re.Match[str]") -> str:
    """Return all comment lines at the head of a hole as one text."""
    return " ".join([hole["task"], *re.findall(r"# (.+)", hole["more"])])


def _is_empty(code: str) -> bool:
    """Whether a hole holds comments, ``pass``, ``...`` or NotImplementedError alone."""
    lines = filter(None, (line.partition("#")[0].strip() for line in code.splitlines()))
    return all(line in ("pass", "...") or "NotImplementedError" in line for line in lines)


def _empty(hole: "re.Match[str]") -> str:
    """Return a hole without its code."""
    indent, number = hole["indent"], hole["number"]
    head = f"{indent}# Hole {number} ({hole['section']}): {hole['task']}\n{hole['more']}"
    body = f'{indent}raise NotImplementedError("hole {number}")\n'
    return f"{head}{body}{indent}# End of hole {number}."


@cache
def _read(folder: str, name: str) -> str:
    return files("ostinato.labs").joinpath(folder, name).read_text("utf-8")

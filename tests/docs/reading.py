"""Read Markdown and the repository for tests of the docs."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block.

    Attributes:
        language: What stands behind the fence; may be empty.
        text: What stands between the fences.
        title: What stands behind the language; may be empty.
        before: The line above the fence that is not blank; may be empty.
    """

    language: str
    text: str
    title: str = ""
    before: str = ""


def code_blocks(path: Path, *languages: str) -> list[CodeBlock]:
    """A page's fenced blocks in these languages, in order."""
    return [block for block in all_blocks(path) if block.language in languages]


def all_blocks(path: Path) -> Iterator[CodeBlock]:
    """Walk a page's fenced blocks."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        above = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
        yield CodeBlock(match[1], match[3], match[2].strip(), above)


def prose(path: Path) -> str:
    """A page without its fenced blocks and its inline code."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", "", text)


def tracked_files() -> list[Path]:
    """Every file that the repository holds, or would hold; without git, every file."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    if shutil.which("git"):
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            paths = [ROOT / name for name in listed.stdout.split("\0") if name]
            return [path for path in paths if path.is_file()]
    ignored = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text().splitlines()} | {
        ".git"
    }
    paths = [path for path in ROOT.rglob("*") if ignored.isdisjoint(path.parts)]
    return [path for path in paths if path.is_file()]


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    return [path for path in tracked_files() if path.suffix == ".md"]


def name_of(path: Path) -> str:
    """A file's path from the root of the repository, as test id."""
    return path.relative_to(ROOT).as_posix()

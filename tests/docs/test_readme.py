"""The README's snippets run, its flags exist, its trees are those of the repository.

A Python block that cannot run here (it needs a big model, say) has a comment above it that says
so: `<!-- not run: reason -->`. Everything else is run or compared.
"""

import os
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.docs.reading import ROOT, CodeBlock, code_blocks, name_of, pages

README = ROOT / "README.md"
BRANCH = re.compile(r"^((?:[│ ] {3})*)[├└]── (\S+)")


def commands() -> list[tuple[Path, list[str]]]:
    """Every line of a shell block on any page, split into words, with the page it is on."""
    found = []
    for page in pages():
        for block in code_blocks(page, "bash", "sh", "shell", "console"):
            lines = block.text.replace("\\\n", " ").splitlines()
            words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
            found += [(page, line) for line in words if line]
    return found


@cache
def help_of(*command: str) -> str:
    """What `ostinato COMMAND --help` prints."""
    return Terminal(columns=200).show(*command, "--help")


def test_the_readme_is_read_in_a_few_minutes():
    """What is longer goes to a page of its own."""
    assert len(README.read_text().splitlines()) <= 200


def test_python_snippets_that_are_not_run_are_at_least_python():
    """They compile, and say why they are not run."""
    for block in code_blocks(README, "python"):
        compile(block.text, "README.md", "exec")


def test_scripts_on_the_pages_exist():
    """What stands first in a command, or behind `python`, if it is a file of ours."""
    for page, words in commands():
        for word in words[:3]:
            if word.startswith(("scripts/", "./scripts/", "benchmarks/", ".ci/")):
                assert (ROOT / word).is_file(), f"{name_of(page)}: {shlex.join(words)}"
                assert word.endswith(".py") or os.access(ROOT / word, os.X_OK), word


def test_flags_of_our_command_line_exist():
    """`ostinato COMMAND --flag`: the command is known, and its help names the flag."""
    for page, words in commands():
        if "ostinato" not in (first := words[0].rpartition("/")[2]):
            continue
        assert first == "ostinato", words
        most = (
            3 if words[1] in ("cache", "keys", "labs", "models", "route") else 2
        )  # groups of commands
        command = [word for word in words[1:most] if not word.startswith("-")]
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [f for f in flags if not re.search(rf"{f}(?![\w-])", help_of(*command))]
        assert not unknown, f"{name_of(page)}: {shlex.join(words)}"


def test_the_readme_names_the_two_commands_that_set_everything_up():
    """One runs the demo, one the checks."""
    named = {words[0].removeprefix("./") for page, words in commands() if page == README}
    assert {"scripts/demo", "scripts/check"} <= named


def test_file_trees_are_those_of_the_repository():
    """Every path that a tree draws exists; a package's tree names all of its rooms."""
    for page, block in [(p, b) for p in pages() for b in code_blocks(p, "", "text")]:
        tree = drawn_paths(block)
        missing = [path for path in tree if not (ROOT / path).exists()]
        assert not missing, f"{name_of(page)} draws {missing}"
        if any(path.startswith("src/ostinato/") for path in tree):
            rooms = {p.parent.name for p in (ROOT / "src/ostinato").glob("*/__init__.py")}
            drawn = {path.split("/")[2] for path in tree if path.startswith("src/ostinato/")}
            assert rooms <= drawn, f"{name_of(page)} leaves out {rooms - drawn}"


def drawn_paths(block: CodeBlock) -> list[str]:
    """The paths of a tree drawn with branches, or by indentation; empty for anything else."""
    lines = [line for line in block.text.splitlines() if line.strip()]
    if not lines or not re.match(r"[\w.-]+(/[\w.-]+)*/(\s|$)", lines[0]):
        return []
    parents = [lines[0].split()[0].rstrip("/")]
    paths = []
    for line in lines[1:]:
        if branch := BRANCH.match(line):
            depth, name = len(branch[1]) // 4 + 1, branch[2]
        elif entry := re.match(r"((?:  )+)([\w.-]+/?)(?:\s|$)", line):
            depth, name = len(entry[1]) // 2, entry[2]
        else:
            continue
        parents = [*parents[:depth], name.rstrip("/")]
        paths.append("/".join(parents))
    return paths


@pytest.mark.parametrize(
    "text",
    [
        "src/ostinato/\n├── core/   words\n│   ├── ids.py\n│   └── plan.py   steps\n└── cli/\n",
        "src/ostinato/\n  core/   words\n    ids.py\n    plan.py   steps\n  cli/\n",
    ],
)
def test_trees_are_read_in_both_styles(text: str):
    """With branches and with bare indentation, comments behind the names."""
    names = ["core", "core/ids.py", "core/plan.py", "cli"]
    assert drawn_paths(CodeBlock("", text)) == [f"src/ostinato/{name}" for name in names]

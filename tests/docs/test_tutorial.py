"""The tutorial's code blocks are one program that runs and proves what the page says."""

import contextlib
import io
import sys

import pytest

from tests.docs.reading import ROOT, code_blocks

PAGE = ROOT / "docs/tutorial.md"
MAX_LINES = 100

# Each is a mistake of the article behind the tutorial, put back in.
MISTAKES = {
    "a full hit computes nothing": (
        "range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE)",
        "range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)",
    ),
    "the root is evicted first": ("if not known[d].num_children and d != needed", ""),
    "the chain is cut": ("sha256(parent + struct", "sha256(ROOT + struct"),
    "generated blocks are not published": (
        "cache.publish(tokens, kv)",
        "cache.publish(tokens, kv[: len(prompt)])",
    ),
    "nothing is published": ("cache.publish(tokens, kv)", "pass"),
}


def program() -> str:
    """The page's Python blocks, one after the other."""
    return "\n\n".join(block.text for block in code_blocks(PAGE, "python"))


def run(source: str) -> str:
    """What a program prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "tutorial", "exec"), {"__name__": "tutorial"})
    return printed.getvalue()


def test_the_program_runs_and_prints_what_it_saves():
    """Its assertions are the four examples, and the thousand calls."""
    assert run(program()) == "computed 16,512 tokens, saved 511,488\n"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_examples_catch(mistake: str):
    """An example that a wrong cache could pass would teach the wrong thing."""
    right, wrong = MISTAKES[mistake]
    assert program().count(right) == 1
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run(program().replace(right, wrong))


def test_the_program_is_as_short_as_its_title_says():
    """Blank lines do not count, as the page says; everything else does."""
    lines = [line for line in program().splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


def test_the_program_needs_nothing_but_python():
    """No torch, no NumPy: only what comes with the language."""
    imported = {
        line.split()[1] for line in program().splitlines() if line.startswith(("import", "from"))
    }
    assert imported <= sys.stdlib_module_names

"""The notebooks of labs 1 and 2: the standard library, the lab's file, and nothing else."""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from ostinato.labs.course import LABS, Lab

WITH_NOTEBOOK = [lab for lab in LABS if lab.notebook is not None]


def cells(lab: Lab) -> list[str]:
    """Return the code cells of a lab's notebook."""
    notebook = json.loads(lab.notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def output_of(lab: Lab, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run all cells in one namespace beside a lab's file; return what they print."""
    (folder / f"{lab.name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, lab.name, raising=False)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells(lab):
            exec(compile(cell, "cell", "exec"), namespace)
    monkeypatch.delitem(sys.modules, lab.name)
    return printed.getvalue()


def test_labs_1_and_2_have_notebooks():
    assert [lab.number for lab in WITH_NOTEBOOK] == [1, 2]


@pytest.mark.parametrize("lab", WITH_NOTEBOOK, ids=lambda lab: lab.name)
def test_a_notebook_runs_with_the_solution_and_finds_no_difference(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = output_of(lab, lab.solution, tmp_path, monkeypatch)
    assert output.splitlines()[-1] == "first difference -> none"


@pytest.mark.parametrize("lab", WITH_NOTEBOOK, ids=lambda lab: lab.name)
def test_a_notebook_runs_with_empty_holes_and_says_so(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = output_of(lab, lab.template, tmp_path, monkeypatch)
    assert "hole 1 is not filled yet" in output


@pytest.mark.parametrize("lab", WITH_NOTEBOOK, ids=lambda lab: lab.name)
def test_a_notebook_needs_nothing_that_a_browser_has_not(lab: Lab):
    """JupyterLite has the standard library; the lab's file is beside the notebook."""
    for text in (*cells(lab), lab.solution):
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= {*sys.stdlib_module_names, lab.name}

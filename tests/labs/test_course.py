"""Eight labs: folders that are written, files with holes, and how they are checked."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.core.errors import ConfigError
from ostinato.labs.course import LABS, Lab, unfilled_holes, write_labs
from ostinato.labs.grading import HEIGHT, Verdict, checks_of, grade, grade_here, verdict_text

runner = CliRunner()
DOCS = Path(__file__).parents[2] / "docs"

each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)


def verdict_of(lab: Lab, text: str, folder: Path) -> Verdict:
    """Check a text in this process."""
    path = folder / f"{lab.name}.py"
    path.write_text(text)
    return Verdict(**grade_here(lab.number, str(path)))


# --- files ---


@each_lab
def test_the_file_of_a_lab_is_its_solution_without_what_is_in_the_holes(lab: Lab):
    """Numbered from 1 on; each names a section that the page has."""
    assert [hole.number for hole in lab.holes] == list(range(1, len(lab.holes) + 1))
    assert len(lab.holes) >= 3
    assert unfilled_holes(lab.template, lab) == list(lab.holes)
    assert unfilled_holes(lab.solution, lab) == []
    headings = {line[3:] for line in lab.page.splitlines() if line.startswith("## ")}
    assert {hole.section for hole in lab.holes} <= headings


@each_lab
def test_each_hole_is_asked_for_by_a_check(lab: Lab):
    checked = {hole for check in checks_of(lab) for hole in check.holes}
    assert checked == {hole.number for hole in lab.holes}


@each_lab
def test_a_file_of_a_lab_imports_nothing_of_ostinato(lab: Lab):
    """Rule 1: it runs in a notebook."""
    assert "import ostinato" not in lab.solution and "from ostinato" not in lab.solution


@each_lab
def test_a_page_says_what_others_do_and_how_to_run_the_lab_for_real(lab: Lab):
    page = lab.page
    assert page.startswith(f"# Lab {lab.number}: ")
    assert "## What others do" in page and "## Run it for real" in page
    assert f"ostinato labs check {lab.number}" in page and "arXiv" in page
    assert f"{lab.minutes} minutes, `{lab.name}.py`" in page and lab.minutes <= 60
    assert page.count("```text") >= 2, "a picture, and the figure to be seen"


def test_new_writes_a_page_a_file_with_holes_and_a_check_for_each(tmp_path: Path):
    """And refuses to write over anybody's work."""
    places = write_labs(tmp_path / "labs")
    assert [place.name for place in places] == [lab.folder for lab in LABS]
    for lab in LABS:
        files = {path.name for path in (tmp_path / "labs" / lab.folder).iterdir()}
        assert {"README.md", f"{lab.name}.py", "check.py"} <= files
    before = (tmp_path / "labs" / LABS[0].file).read_text()
    with pytest.raises(ConfigError, match="exists, and a new lab never overwrites"):
        write_labs(tmp_path / "labs")
    assert (tmp_path / "labs" / LABS[0].file).read_text() == before


# --- checks ---


@each_lab
def test_a_solution_passes_every_check(lab: Lab, tmp_path: Path):
    verdict = verdict_of(lab, lab.solution, tmp_path)
    assert verdict.passed and verdict.num_passed == verdict.num_checks == len(checks_of(lab))


@each_lab
def test_holes_are_asked_for_one_after_the_other(lab: Lab, tmp_path: Path):
    """With the holes before it filled, the first empty one is named, and what to read."""
    for number, hole in enumerate(lab.holes):
        text = lab.template
        for filled in lab.holes[:number]:
            regions = (_region(one, filled.number) for one in (lab.template, lab.solution))
            text = text.replace(*regions)
        verdict = verdict_of(lab, text, tmp_path)
        assert (verdict.kind, verdict.read) == ("unfilled-hole", hole.section), verdict
        assert f"Hole {hole.number} is not filled" in verdict.what


def _region(text: str, number: int) -> str:
    start, end = text.index(f"# Hole {number} ("), f"# End of hole {number}."
    return text[start : text.index(end) + len(end)]


@pytest.mark.parametrize("placeholder", ["pass", "...", "# later"])
def test_a_placeholder_does_not_fill_a_hole(placeholder: str, tmp_path: Path):
    text = LABS[0].template.replace('raise NotImplementedError("hole 1")', placeholder)
    if placeholder.startswith("#"):  # as it would be written: with something to run beside it
        text = text.replace(placeholder, f"pass  {placeholder}")
    verdict = verdict_of(LABS[0], text, tmp_path)
    assert verdict.kind == "unfilled-hole" and "Hole 1" in verdict.what


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ("def usable_tokens", "def usable", "missing-name", "usable_tokens"),
        ("    def match(", "    def find(", "missing-name", "no method match"),
        ("return match\n", "return match[\n", "syntax", "is no Python"),
        ("match.append(self.blocks[digest])", "match.append(self.blocks[0])", "raises", "KeyError"),
        ("        return match\n", "        pass\n", "wrong-type", "returns NoneType"),
        ("return (num_tokens - 1)", "raise SystemExit(0)\n    return (num_tokens - 1)", "raises",
         "SystemExit in usable_tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_python_is_named(
    old: str, new: str, kind: str, words: str, tmp_path: Path
):
    """The student's line is shown, and no traceback of ours."""
    verdict = verdict_of(LABS[0], LABS[0].solution.replace(old, new), tmp_path)
    assert verdict.kind == kind and words in verdict.what
    assert "ostinato/labs" not in verdict_text(LABS[0], verdict)
    if kind == "raises":
        assert verdict.picture[0].startswith("line ")


BEGINNING = "        match = []\n"
ENDLESS = BEGINNING, BEGINNING + "        while True:\n            match = []\n"


def test_an_endless_loop_is_named_with_its_line(tmp_path: Path):
    """In a process with a time limit."""
    path = tmp_path / "blocks.py"
    path.write_text(LABS[0].solution.replace(*ENDLESS))
    verdict = grade(LABS[0], path, limit_s=1.0)
    assert verdict.kind == "endless" and "still in match" in verdict.what
    assert verdict.picture[0].startswith("line ")


def test_a_file_that_ends_the_process_is_named(tmp_path: Path):
    path = tmp_path / "blocks.py"
    text = LABS[0].solution.replace(BEGINNING, BEGINNING + "        os._exit(0)\n")
    path.write_text("import os\n" + text)
    assert grade(LABS[0], path, limit_s=5.0).kind == "ended-the-process"


def test_what_a_file_prints_disturbs_nothing(tmp_path: Path):
    text = LABS[0].solution.replace(BEGINNING, BEGINNING + "        print('x' * 1000)\n")
    path = tmp_path / "blocks.py"
    path.write_text(text)
    assert grade(LABS[0], path).passed


# --- the command ---


def test_without_a_command_the_labs_are_listed_with_the_next_step():
    result = runner.invoke(app, ["labs"])
    assert result.exit_code == 0
    assert all(lab.file in result.output for lab in LABS)
    assert "ostinato labs new labs" in result.output
    assert len(result.output.splitlines()) <= HEIGHT


def test_a_lab_is_walked_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """New, an empty hole, the solution, passed; from the folder, and by ``--folder``."""
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["labs", "new", "labs"]).exit_code == 0
    empty = runner.invoke(app, ["labs", "check", "1"])
    assert empty.exit_code == 3 and "Hole 1 is not filled" in empty.output
    solution = runner.invoke(app, ["labs", "solution", "1"])
    (tmp_path / "labs" / LABS[0].file).write_text(solution.output)
    passed = runner.invoke(app, ["labs", "check", "1", "--folder", str(tmp_path / "labs")])
    assert passed.exit_code == 0 and "ostinato serve" in passed.output


@pytest.mark.nightly
def test_every_lab_is_walked_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And all of them are checked at once, for teachers."""
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["labs", "new", "labs"]).exit_code == 0
    every = runner.invoke(app, ["labs", "check", "--all", "--json"])
    assert every.exit_code == 3
    assert {one["kind"] for one in json.loads(every.output)} == {"unfilled-hole"}
    for lab in LABS:
        text = runner.invoke(app, ["labs", "solution", str(lab.number)]).output
        (tmp_path / "labs" / lab.file).write_text(text)
        assert runner.invoke(app, ["labs", "check", str(lab.number)]).exit_code == 0
    every = runner.invoke(app, ["labs", "check", "--all", "--json"])
    assert every.exit_code == 0
    assert [one["passed"] for one in json.loads(every.output)] == [True] * len(LABS)


def test_the_json_of_a_check_is_what_the_docs_say(tmp_path: Path):
    """Each field is in the table of docs/learn.md, and the table has no other."""
    table = (DOCS / "learn.md").read_text("utf-8").partition("| Field |")[2].partition("\n\n")[0]
    documented = [name for row in table.splitlines()[2:] for name in _quoted(row.split("|")[1])]
    missing = str(tmp_path / "none.py")
    result = runner.invoke(app, ["labs", "check", "3", "--file", missing, "--json"])
    assert result.exit_code == 3
    [verdict] = json.loads(result.output)
    assert list(verdict) == documented
    assert (verdict["lab"], verdict["file"], verdict["kind"]) == (3, missing, "no-file")


def _quoted(text: str) -> list[str]:
    return text.split("`")[1::2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "1", "--all"],
        ["check", "9"],
        ["check", "--all", "--file", "x.py"],
        ["check", "1", "--folder", "nowhere"],
        ["solution", "0"],
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["labs", *arguments])
    assert result.exit_code == 2, result.output

"""Each planted mistake is named by its kind, with an example, on one screen."""

import importlib
from pathlib import Path

import pytest

from ostinato.labs.course import LABS, Lab
from ostinato.labs.grading import HEIGHT, WIDTH, Verdict, grade, grade_here, verdict_text


def planted(lab: Lab) -> dict[str, tuple[str, str]]:
    """Return the planted mistakes of a lab: kind, and what replaces what in the solution."""
    mistakes: dict[str, tuple[str, str]] = importlib.import_module(
        f"tests.labs.planted.{lab.name}"
    ).PLANTED
    return mistakes


CASES = [(lab, kind) for lab in LABS for kind in planted(lab)]


def plant(lab: Lab, kind: str, folder: Path) -> Path:
    """Write a solution with one mistake."""
    old, new = planted(lab)[kind]
    assert lab.solution.count(old) == 1, f"{old!r} is there {lab.solution.count(old)} times"
    path = folder / f"{lab.name}.py"
    path.write_text(lab.solution.replace(old, new))
    return path


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)
def test_every_lab_has_ten_planted_mistakes_or_more(lab: Lab):
    assert len(planted(lab)) >= 10


@pytest.mark.parametrize(("lab", "kind"), CASES, ids=lambda case: getattr(case, "name", case))
def test_a_planted_mistake_is_named(lab: Lab, kind: str, tmp_path: Path):
    """By its kind; the message has the smallest example and fits one screen."""
    verdict = Verdict(**grade_here(lab.number, str(plant(lab, kind, tmp_path))))
    assert (verdict.passed, verdict.kind) == (False, kind), verdict
    lines = verdict_text(lab, verdict).splitlines()
    assert len(lines) <= HEIGHT and max(map(len, lines)) <= WIDTH
    assert kind in lines[2] and verdict.what
    assert verdict.picture or kind == "not-repeatable"
    assert verdict.read in {hole.section for hole in lab.holes}


@pytest.mark.nightly
@pytest.mark.parametrize(("lab", "kind"), CASES, ids=lambda case: getattr(case, "name", case))
def test_a_planted_mistake_is_named_in_a_process_of_its_own(lab: Lab, kind: str, tmp_path: Path):
    """As the command does it."""
    assert grade(lab, plant(lab, kind, tmp_path)).kind == kind

"""Checks the file of a lab: statically first, then by running it against every check.

``grade`` runs ``grade_here`` in a process with limits: the file may loop, exit or eat memory.
"""

import contextlib
import importlib
import io
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any

from ostinato.labs.course import Hole, Lab, defined_names, lab_of, unfilled_holes
from ostinato.labs.mistakes import Check, Mistake, Story
from ostinato.plugins.child import NO_RESULT, OUT_OF_TIME, TimeUp, run_limited
from ostinato.plugins.loading import import_file

LIMIT_S = 10.0
"""Time limit of a check; those of the solutions take less than a second."""

WIDTH, HEIGHT = 80, 24
"""Columns and lines of a screen, which a verdict fits on."""

_MAX_LINES = 8  # of a picture


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a lab's check.

    Attributes:
        lab: Its number.
        file: What was checked.
        passed: Whether all is right.
        num_checks: Checks of the lab.
        num_passed: Those that pass, up to the first mistake.
        kind: Name of the mistake; empty if there is none.
        what: The mistake in a sentence.
        picture: The smallest input that shows it, and what comes out.
        why: What it would do to a model.
        read: Heading of the page to read.
    """

    lab: int
    file: str
    passed: bool
    num_checks: int
    num_passed: int
    kind: str = ""
    what: str = ""
    picture: list[str] = field(default_factory=list)
    why: str = ""
    read: str = ""


def grade(lab: Lab, path: Path, limit_s: float = LIMIT_S) -> Verdict:
    """Check a lab's file in a process of its own; the file never runs in this one."""
    failed = partial(Verdict, lab.number, str(path), False, len(checks_of(lab)), 0)
    if not path.is_file():
        return failed("no-file", f"There is no file {path}: `ostinato labs new FOLDER` writes it.")
    answer = run_limited("ostinato.labs.grading:grade_here", [lab.number, str(path)], limit_s)
    if answer in (OUT_OF_TIME, NO_RESULT):
        return failed(*_ENDINGS[answer])
    return Verdict(**answer)


_ENDINGS = {
    OUT_OF_TIME: (
        "endless",
        "The file does not return, and not even an alarm interrupts it: look for a loop in "
        "compiled code, or for `except:` without a name around a loop.",
    ),
    NO_RESULT: (
        "ended-the-process",
        "The file ended the process that checked it: look for os._exit, or for a recursion or a "
        "list that grows without bound.",
    ),
}


def checks_of(lab: Lab) -> list[Check]:
    """Return the checks of a lab."""
    module = importlib.import_module(f"ostinato.labs.checks.{lab.name}")
    checks: list[Check] = module.CHECKS
    return checks


def grade_here(number: int, file: str) -> dict[str, Any]:
    """Check a lab's file in this process; returns a ``Verdict`` as JSON."""
    lab, path, num_passed = lab_of(number), Path(file), 0
    checks = checks_of(lab)
    text = path.read_text("utf-8", errors="replace")
    mistake, read = None, ""
    try:
        _check_names(lab, text, path)
        empty = unfilled_holes(text, lab)
        module = _import(path)
        for check in _ready(checks, empty):
            read = lab.hole(check.holes[-1]).section if check.holes else ""
            _run(check, module, path)
            num_passed += 1
        if empty:
            read = empty[0].section
            raise _unfilled(empty[0], len(empty))
    except Mistake as error:
        mistake = error
    verdict = Verdict(number, file, mistake is None, len(checks), num_passed)
    if mistake is not None:
        verdict = replace(
            verdict, kind=mistake.kind, what=mistake.what, picture=list(mistake.picture),
            why=mistake.why, read=read,
        )  # fmt: skip
    return asdict(verdict)


def _ready(checks: list[Check], empty: list[Hole]) -> Iterator[Check]:
    """Walk the checks that need no hole which is still empty."""
    left = {hole.number for hole in empty}
    return (check for check in checks if left.isdisjoint(check.holes))


def _unfilled(hole: Hole, num_left: int) -> Mistake:
    more = "" if num_left == 1 else f" {num_left} holes are left."
    return Mistake("unfilled-hole", f"Hole {hole.number} is not filled: {hole.task}{more}")


def _check_names(lab: Lab, text: str, path: Path) -> None:
    """Raise a mistake for a file that cannot be parsed, or lacks a name of the template."""
    try:
        names = defined_names(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        source = text.splitlines()[line - 1 : line]
        raise Mistake(
            "syntax", f"Line {line} of {path.name} is no Python: {getattr(error, 'msg', error)}.",
            [f"{line:>4}  {one.rstrip()}" for one in source],
        ) from error  # fmt: skip
    for name, methods in lab.required.items():
        if name not in names:
            raise Mistake("missing-name", f"{path.name} defines no {name}, which it began with.")
        for method in methods:
            if method not in names[name]:
                raise Mistake("missing-name", f"{name} has no method {method} any more.")


def _import(path: Path) -> ModuleType:
    with _named_errors(path, Story()):
        return import_file(path)


def _run(check: Check, module: ModuleType, path: Path) -> None:
    story = Story()
    with _named_errors(path, story):
        check.run(module, story)


@contextlib.contextmanager
def _named_errors(path: Path, story: Story) -> Iterator[None]:
    """Turn what the file raises into a mistake with the line; keep what it prints to itself."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Mistake:
        raise
    except TimeUp as error:
        place, line = _line(error, path)
        raise Mistake(
            "endless", f"The code does not return: it is still in {place} when time is up.",
            [line, *story[-_MAX_LINES:]],
        ) from error  # fmt: skip
    except NotImplementedError as error:
        place, line = _line(error, path)
        what = f"{str(error).capitalize() or 'A hole'} is not filled, in {place}."
        raise Mistake("unfilled-hole", what, [line]) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        place, line = _line(error, path)
        what = f"{type(error).__name__} in {place}: {error}"
        raise Mistake("raises", what[:300], [line, *story[-_MAX_LINES:]]) from error


def _line(error: BaseException, path: Path) -> tuple[str, str]:
    """Return the function and the source line of the file in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == path.name]
    if not own:
        last = frames[-1]
        return "the check, with what your code returned", f"{last.line or ''}"
    return own[-1].name, f"line {own[-1].lineno}:  {own[-1].line}"


def verdict_text(lab: Lab, verdict: Verdict) -> str:
    """Return a verdict for a terminal: at most one screen."""
    head = f"Lab {lab.number} ({lab.name})"
    counts = f"{verdict.num_passed} of {verdict.num_checks} checks pass"
    if verdict.passed:
        serve = lab.serve.format(file=verdict.file)
        lines = [f"{head}: passed, {counts}.", "Now run it for real:", "", f"    {serve}", ""]
        if lab.traffic:
            lines += ["and in another shell", "", f"    {lab.traffic}", ""]
        return "\n".join([*lines, f"{lab.folder}/README.md says what to look at."])
    lines = [f"{head}: not yet, {counts}.", ""]
    lines += wrap(f"{verdict.kind}: {verdict.what}", WIDTH)
    if verdict.picture:
        lines += ["", *(f"    {line}"[: WIDTH - 1] for line in verdict.picture[:10])]
    if verdict.why:
        lines += ["", *wrap(verdict.why, WIDTH)]
    if verdict.read:
        lines += ["", f'Read "{verdict.read}" in {lab.folder}/README.md.']
    return "\n".join(lines[:HEIGHT])

"""The result of a check in words: at most one screen of 80 columns and 24 lines."""

from textwrap import wrap

from ostinato.labs.course import Lab
from ostinato.labs.grading import Verdict

WIDTH, HEIGHT = 80, 24


def verdict_text(lab: Lab, verdict: Verdict) -> str:
    """Return a verdict for a terminal."""
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

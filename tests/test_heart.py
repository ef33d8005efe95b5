"""Budgets of the heart: code lines by room; files and calls of one warm admission."""

import sys
from array import array
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.sched.scheduler import Scheduler

ROOT = Path(__file__).parents[1]
BUDGETS = {"core": 555, "cache": 1_301, "sched": 767}
"""Code lines: without blank lines, comments and docstrings, so that explaining costs nothing.

Those of ``sched`` include the rows of drafts, which a step computes and commits one by one, and the
forks of running sequences, by which beams continue.
"""


def code_lines(folder: Path) -> int:
    """Count the lines of code of all Python files below a folder."""
    return sum(map(num_code_lines, (path.read_text() for path in folder.rglob("*.py"))))


def num_code_lines(source: str) -> int:
    """Count the lines that are neither blank nor a comment nor of a docstring.

    A docstring is a text in three quotes that begins its line; a tokenizer would take 200 times as
    long.
    """
    count, is_in_text, is_docstring = 0, False, False
    for line in map(str.strip, source.splitlines()):
        if not is_in_text:
            is_docstring = line.startswith('"""')
        if line and not is_docstring and (is_in_text or not line.startswith("#")):
            count += 1
        is_in_text ^= line.count('"""') % 2 == 1
    return count


def test_code_lines_are_those_without_blanks_comments_and_docstrings():
    source = '''
"""What it is.

In two paragraphs."""

import os  # needed

LIMIT = 3
"""Of what."""


def text() -> str:
    """Return it."""
    # nothing else
    return """two
lines"""
'''
    assert num_code_lines(source) == 5


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_of_the_heart_stays_within_its_code_lines(room: str):
    lines = code_lines(ROOT / "src/ostinato" / room)
    assert lines <= BUDGETS[room], f"{room} has {lines} code lines"


def test_the_size_of_the_whole_is_printed(capsys: pytest.CaptureFixture[str]):
    """Without a bound: the rooms of the heart have one, and the others' sizes are for review."""
    rooms = [path for path in (ROOT / "src/ostinato").iterdir() if any(path.glob("*.py"))]
    sizes = {f"src/ostinato/{room.name}": code_lines(room) for room in sorted(rooms)}
    sizes |= {f"all of {name}": code_lines(ROOT / name) for name in ("src", "tests", "benchmarks")}
    with capsys.disabled():
        print("\ncode lines:", ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    assert sizes["all of src"] > sum(BUDGETS.values())


def serve(scheduler: Scheduler, name: str, prompt: str) -> None:
    """Serve one request to its end."""
    tokens = array("I", map(ord, prompt))
    scheduler.add(Request(RequestId(name), tokens, SamplingParams(max_tokens=1)), (0,))
    scheduler.commit(answer(scheduler.plan()))


def answer(plan: StepPlan) -> StepResult:
    """Answer a plan as a runner would."""
    return StepResult(tuple(SequenceResult((SampledToken(7),)) for _ in plan.sequences))


def test_a_warm_admission_goes_through_few_files_and_calls():
    """Four tokens shared, two copied: who reads it with a debugger meets no more than this."""
    cache = CacheManager(CacheConfig(num_blocks=16, block_size=4))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), cache)
    serve(scheduler, "first", "ABCDEFGHIJ")
    tokens = array("I", map(ord, "ABCDEFXYZ"))
    scheduler.add(Request(RequestId("warm"), tokens, SamplingParams(max_tokens=1)), (0,))
    files, calls = set[str](), Counter[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        callee, caller = (f.f_code.co_filename for f in (frame, frame.f_back))
        if "/ostinato/" in callee and "/core/" not in callee:
            files.add(callee)
            if callee != caller:
                calls[caller.rpartition("/")[2], callee.rpartition("/")[2]] += 1

    sys.setprofile(note)
    try:
        plan = scheduler.plan()
    finally:
        sys.setprofile(None)
    assert plan.num_tokens == 3, "six of nine tokens hit"
    scheduler.commit(answer(plan))
    names = sorted(file.rpartition("/")[2] for file in files)
    print(f"{len(names)} files, {sum(calls.values())} calls between them")
    assert len(names) <= MAX_FILES, names
    assert sum(calls.values()) <= MAX_CALLS, calls


MAX_FILES, MAX_CALLS = 10, 33

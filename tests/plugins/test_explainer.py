"""An explanation of one's own: what it is shown, and what it has to return."""

from pathlib import Path

import pytest

from ostinato.core.errors import ConfigError
from ostinato.labs.course import lab_of
from ostinato.plugins.explainer import Explainer, check_explainer, failure_of, read_prompt
from tests.support.cache.tiny_cache import tiny_cache


@pytest.fixture
def solution(tmp_path: Path) -> Path:
    path = tmp_path / "explain.py"
    path.write_text(lab_of(8).solution)
    return path


def test_the_solution_of_the_lab_passes_the_contract(solution: Path):
    assert failure_of(f"{solution}:explain") == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("new_span(elsewhere, size, rest)", "", "the spans end at token"),
        ("Span(0, num_hit, \"hit\")", "Span(0, num_hit + 1, \"hit\")", "does not begin at token"),
        ("    size = len(prompt)\n", "    size = 1 / 0\n", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_spans_that_do_not_sum_are_refused(old: str, new: str, words: str, solution: Path):
    text = solution.read_text()
    assert old in text
    solution.write_text(text.replace(old, new))
    assert words in failure_of(f"{solution}:explain")


def test_a_function_is_checked_in_a_process_of_its_own(solution: Path):
    solution.write_text("explain = list")
    with pytest.raises(ConfigError, match="is not plugged in: TypeError"):
        check_explainer(f"{solution}:explain")


def test_what_is_shown_is_what_the_history_remembers(solution: Path):
    """Hits, earlier requests, and what of them was still cached."""
    cache = tiny_cache(3, keep_explanations=10)
    history = cache.prefix_cache.history
    for prompt in ("ABCDEFGHIJKL", "XYZXYZXY", "ABCDEFGHQQQQ"):
        cache.serve(prompt)
    newest = max(history.records(), key=lambda record: record.number)
    newest.name = "last"
    explained = read_prompt(history, "last")
    assert explained is not None
    assert "".join(map(chr, explained.prompt)) == "ABCDEFGHQQQQ"
    assert [(len(one.tokens), one.num_kept) for one in explained.earlier] == [(12, 4), (8, 8)]
    spans = Explainer(f"{solution}:explain").spans(explained)["spans"]
    assert [(s["start"], s["stop"], s["reason"]) for s in spans] == [
        (0, 4, "hit"), (4, 8, "evicted"), (8, 12, "differs")
    ]  # fmt: skip
    assert read_prompt(history, "nothing") is None

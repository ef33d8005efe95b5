"""``ostinato replay``, as a user sees it: an answer is computed again from its log."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.runner.native.library import current_isa, library
from tests.cli.terminal import Terminal
from tests.support.instruction_sets import isa_in_use, needs_library

pytestmark = needs_library

PORTABLE = ("--portable-bits", "--quantization", "w8a8", "--kv-cache-dtype", "int8")
FEW = ("--max-tokens", "6", "--num-blocks", "64", "--json")


@pytest.fixture(scope="module", autouse=True)
def instruction_set() -> Iterator[None]:
    """``--portable-bits`` may leave a part of the processor unused, in the whole process."""
    native = library()
    assert native is not None
    with isa_in_use(current_isa(native)):
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two answers, one with a seed and one greedy, one after the other."""
    terminal = Terminal()
    seeded = terminal.run("generate", "ROMEO:", "--seed", "1", "-n", "2", *FEW, *PORTABLE)
    greedy = terminal.run("generate", "ROMEO:", "--temperature", "0", *FEW, *PORTABLE)
    assert seeded.exit_code == greedy.exit_code == 0, seeded.output + greedy.output
    return seeded.stdout + greedy.stdout


def test_logged_answers_are_computed_again_from_weights_seed_and_tokens(
    terminal: Terminal, log: str, tmp_path: Path
):
    (tmp_path / "log.json").write_text(log)

    result = terminal.run("replay", str(tmp_path / "log.json"))

    assert result.exit_code == 0, result.output
    assert result.stdout == "answer 1: the same 12 tokens\nanswer 2: the same 6 tokens\n"


def test_an_answer_that_was_changed_differs_from_there_on(
    terminal: Terminal, log: str, tmp_path: Path
):
    answer, _ = json.JSONDecoder().raw_decode(log)
    answer["outputs"][1]["token_ids"][4] += 1
    (tmp_path / "log.json").write_text(json.dumps(answer))

    result = terminal.run("replay", str(tmp_path / "log.json"))

    assert result.exit_code == 1
    assert result.stdout == "answer 1: differs from token 4 on, in continuation 1\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "00ff"}, "the log needs weights 00ff, and these are "),
        ({"sampling": {"temperature": 0.7, "n": 2}}, "it has no seed"),
        ({"sampling": {"seed": 3}}, "it has 2 continuations of 1"),
        ({"settings": {}}, "cannot be replayed"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_refused(
    change: dict[str, object], message: str, terminal: Terminal, log: str, tmp_path: Path
):
    answer, _ = json.JSONDecoder().raw_decode(log)
    answer["replay"] |= change
    (tmp_path / "log.json").write_text(json.dumps(answer))

    result = terminal.run("replay", str(tmp_path / "log.json"))

    assert result.exit_code not in (0, 1)
    assert message in " ".join(result.stderr.split())


def test_what_is_no_log_is_refused(terminal: Terminal, tmp_path: Path):
    for text in ("", "{", "[]", "{}"):
        (tmp_path / "log.json").write_text(text)
        result = terminal.run("replay", str(tmp_path / "log.json"))
        assert result.exit_code not in (0, 1) and "bug" not in result.stderr, result.stderr

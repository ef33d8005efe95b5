"""A worker's limits, on systems with and without one of memory."""

import io
import resource
import sys
from types import SimpleNamespace

import pytest

from ostinato.engine.worker_process import answer_questions
from ostinato.plugins import child


def recorded_limits(monkeypatch: pytest.MonkeyPatch, system: str) -> list[int]:
    """Pretend to be on a system; macOS refuses limits of address space, as Python reports it."""
    kinds: list[int] = []

    def limit(kind: int, value: tuple[int, int]) -> None:
        if system == "darwin" and kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        kinds.append(kind)

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "setrlimit", limit)
    return kinds


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_worker_answers_where_memory_cannot_be_limited(
    system: str, monkeypatch: pytest.MonkeyPatch
):
    kinds, output = recorded_limits(monkeypatch, system), io.BytesIO()
    question = (3).to_bytes(8, "little") + b"abc"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(question)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=output))

    answer_questions(lambda text: [text.upper()], cpu_limit_s=5, memory_limit_bytes=2**20)

    assert output.getvalue()[8:] == b"ABC"
    assert (resource.RLIMIT_AS in kinds) == (system == "linux")
    assert resource.RLIMIT_CPU in kinds


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_code_of_a_user_is_checked_where_memory_cannot_be_limited(
    system: str, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    kinds = recorded_limits(monkeypatch, system)
    monkeypatch.setattr(sys, "stdin", io.StringIO('["a", "b"]'))

    child.main("posixpath:join", str(tmp_path / "result"), "5")

    assert (tmp_path / "result").read_text() == '"a/b"'
    assert (resource.RLIMIT_AS in kinds) == (system == "linux")
    assert resource.RLIMIT_CPU in kinds

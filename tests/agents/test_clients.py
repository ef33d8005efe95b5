"""Agents as npm and PyPI ship them, each in a home of its own: two questions, 20 calls, then anew.

Of each it is asserted that no request is refused, that inside a loop of calls it hits what an
append-only client does, and that a second conversation hits the instructions and the tools. The
figures are printed as the table of ``docs/agents.md``: run it with ``-s``.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.agents.clients import CLIENTS, AgentClient
from tests.agents.installing import Installer, version_of
from tests.support.scripted_model import ScriptedLLM, Turn, common_prefix, scripted_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]

NUM_CALLS = 10
ASK = "Play the steps aloud"
QUESTIONS = (f"{ASK}, all of them.", f"{ASK}, once more.")
OTHER_QUESTION = f"{ASK}, in another conversation."
_RUN_S = 600


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    return Installer(tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedLLM]]:
    """Serve a model whose script the tests set."""
    path = tmp_path_factory.mktemp("agent-model")
    with scripted_server(path, lambda _: "Echoes") as served:
        yield served


@dataclass(frozen=True)
class Figures:
    """What an agent hit, as shares of what an append-only client hits.

    Such a client's request hits the last prompt and the last answer, without reasoning that the
    template has dropped since; text that a client adds to an answer is new.

    Attributes:
        in_loop: The least of all requests inside loops.
        next_question: Of the request with the second question; None where there is none.
        second: Of the first request of a second conversation: of what the two have in common.
    """

    in_loop: float
    next_question: float | None
    second: float

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Figures":
        """Take the figures of two conversations."""
        starts = [
            place
            for place, turn in enumerate(turns)
            if not place
            or turn.num_asked(ASK) != turns[place - 1].num_asked(ASK)
            or len(turn.prompt) < len(turns[place - 1].prompt)
        ]  # fmt: skip
        shares = {
            place: min(1.0, turns[place].num_cached / before)
            for place in range(1, len(turns))
            if (before := min(turns[place].num_before, turns[place - 1].num_reusable))
        }
        assert len(starts) in (2, 3), starts
        second = starts[-1]
        inside = [share for place, share in shares.items() if place not in starts]
        shared = common_prefix(turns[0].prompt, turns[second].prompt)
        return cls(
            min(inside, default=1.0),
            shares[starts[1]] if len(starts) == 3 else None,
            turns[second].num_cached / shared,
        )


def answered(url: str, path: str) -> tuple[int, list[str]]:
    """Return how many requests of a path succeeded so far, and the counts of failures."""
    num_answered, failed = 0, []
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("ostinato_http_requests_total"):
            if f'route="{path}"' in line and 'status="200"' in line:
                num_answered = int(float(line.split()[-1]))
            elif 'status="4' in line or 'status="5' in line:
                failed.append(line)
    return num_answered, failed


def converse(client: AgentClient, folder: Path, home: Path, url: str, *questions: str) -> str:
    """Hold one conversation; returns what the agent printed."""
    settings = {**os.environ, **client.settle(home, url)}
    printed = ""
    for command in client.commands(folder, questions):
        lines = "".join(f"{question}\n" for question in questions) if client.talks else ""
        result = subprocess.run(
            [word.replace("{url}", url) for word in command],
            input=lines, env=settings, cwd=home, timeout=_RUN_S, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        printed += f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}\n"
    return printed


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give an agent a home; end what it leaves running there, such as Cline's hub."""
    home = tmp_path / "home"
    yield home
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_an_agent_connects_and_hits(
    client: AgentClient, installer: Installer, server: tuple[str, ScriptedLLM], home: Path
):
    url, llm = server
    folder = installer.folder(client)
    llm.script, llm.turns = client.answers(ASK, NUM_CALLS), []
    before, failed_before = answered(url, client.path)
    questions = QUESTIONS if client.continues else QUESTIONS[:1]
    printed = converse(client, folder, home, url, *questions)
    printed += converse(client, folder, home, url, OTHER_QUESTION)
    num_answered, failed = answered(url, client.path)
    assert failed == failed_before, printed
    assert num_answered > before, printed

    turns = [turn for turn in llm.turns if turn.num_asked(ASK) and turn.is_of(client.tool)]
    num_calls = 1 if client.talks else NUM_CALLS + 1
    assert len(turns) >= (len(questions) + 1) * num_calls, printed
    figures = Figures.of(turns)
    row = [client.name, version_of(folder, client), "yes"]
    shares = (figures.in_loop, figures.next_question, figures.second)
    row += ["–" if share is None else f"{share:.1%}" for share in shares]
    print(f"\n| {' | '.join(row)} |")
    assert figures.in_loop >= client.min_in_loop
    assert figures.next_question is None or figures.next_question >= client.min_next_question
    assert figures.second >= client.min_second

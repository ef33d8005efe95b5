"""Agents as npm and PyPI ship them, each in a home of its own: a session, then another one.

A session has two questions and 20 calls, or 20 questions with an agent that calls no tools.

Of each it is asserted that no request is refused, that inside a loop of calls it hits all that it
sends again, and that a second conversation hits the instructions and the tools. The
figures are printed as the table of ``docs/agents.md``: run it with ``-s``.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.agents.clients import CLIENTS, AgentClient
from tests.agents.installing import Installer, version_of
from tests.support.cache.cache_views import num_common
from tests.support.models.scripted_model import ScriptedLLM, Turn, scripted_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3000)]

NUM_CALLS = 10
ASK = "Play the steps aloud"
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
    """What an agent hit.

    A request could hit the last prompt and the last answer, without reasoning that the template has
    dropped since, up to the first message that the agent itself took away, moved or wrote anew. An
    append-only client's request hits all of both.

    Attributes:
        in_loop: The least share of what it could hit of all requests inside loops.
        next_question: That of requests with a later question; None where there is none.
        second: Of the first request of a second conversation: of what the two have in common.
        of_append_only: ``in_loop`` and ``next_question`` as shares of an append-only client's.
        session: Of the whole first conversation, as a share of an append-only client's.
    """

    in_loop: float
    next_question: float | None
    second: float
    of_append_only: tuple[float, float | None]
    session: float

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
        second = starts[-1]
        appended = [
            (min(turn.num_cached, possible), possible)
            for earlier, turn in pairwise(turns[:second])
            for possible in (min(turn.num_before, earlier.num_reusable),)
        ]
        shared = num_common(turns[0].prompt, turns[second].prompt)
        in_loop, next_question = least_shares(turns, starts, Turn.num_repeated)
        return cls(
            in_loop,
            next_question,
            min(1.0, turns[second].num_cached / shared),
            least_shares(turns, starts, lambda turn, _: turn.num_before),
            sum(hits for hits, _ in appended) / sum(possible for _, possible in appended),
        )


def least_shares(
    turns: Sequence[Turn], starts: Sequence[int], reach: Callable[[Turn, Turn], int]
) -> tuple[float, float | None]:
    """Return the least share of hits inside loops, and that of later questions.

    Args:
        turns: Both conversations.
        starts: Places of the questions.
        reach: Returns how many tokens of a turn's prompt it could hit behind an earlier turn.
    """
    shares = {
        place: min(1.0, turn.num_cached / possible)
        for place, (earlier, turn) in enumerate(pairwise(turns), 1)
        if (possible := min(turn.num_before, earlier.num_reusable, reach(turn, earlier)))
    }
    inside = [share for place, share in shares.items() if place not in starts]
    return min(inside, default=1.0), min((shares[p] for p in starts[1:-1]), default=None)


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


def converse(
    client: AgentClient, folder: Path, home: Path, url: str, path: str, *questions: str
) -> str:
    """Hold one conversation in a folder of its user's; returns what the agent printed."""
    work = home / "project"
    work.mkdir(parents=True, exist_ok=True)
    settings = {**os.environ, **client.settle(home, url), "PATH": path}
    printed = ""
    for command in client.commands(folder, questions):
        lines = "".join(f"{question}\n" for question in questions) if client.talks else ""
        result = subprocess.run(
            [word.replace("{url}", url).replace("{home}", str(home)) for word in command],
            input=lines, env=settings, cwd=work, timeout=_RUN_S, capture_output=True, text=True,
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
    questions = [f"{ASK}, time {number}." for number in range(client.num_questions)]
    path = installer.path if client.source == "npm" else os.environ["PATH"]
    printed = converse(client, folder, home, url, path, *questions)
    printed += converse(client, folder, home, url, path, OTHER_QUESTION)
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
    appended = ("–" if share is None else f"{share:.1%}" for share in figures.of_append_only)
    print(f"\n| {' | '.join(row)} |", "of an append-only client's:", *appended, end=" ")
    print(f"{len(turns[-1].prompt):,} tokens; the session: {figures.session:.2%}")
    assert figures.in_loop >= 0.999
    assert figures.next_question is None or figures.next_question >= 0.99
    assert figures.second >= 0.99 and figures.session >= 0.99

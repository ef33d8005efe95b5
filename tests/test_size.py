"""Budgets of the whole: code lines of each tree, and what a warm chat of one token goes through.

The figures are printed; the limits are those of the day on which they were set. They are lowered
when the code shrinks, and raised only together with the reason.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.servers import serving
from tests.test_heart import ROOT, code_lines

MAX_CODE_LINES = {"src": 64_286, "tests": 51_270, "benchmarks": 6_142}
"""Without blank lines, comments and docstrings, so that explaining costs nothing."""

MAX_CHAT_CALLS, MAX_CHAT_FILES = 608, 83

PACKAGE = f"{ROOT / 'src/ostinato'}/"


@pytest.mark.parametrize("tree", MAX_CODE_LINES)
def test_a_tree_stays_within_its_code_lines(tree: str, capsys: pytest.CaptureFixture[str]):
    lines = code_lines(ROOT / tree)
    with capsys.disabled():
        print(f"\n{tree}: {lines:,} code lines", end="")
    assert lines <= MAX_CODE_LINES[tree], f"{tree} has {lines} code lines"


class CallCounter:
    """Counts calls of the package's functions in all threads that start while it is installed."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero."""
        self.calls.clear()
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@pytest.fixture
def counter() -> Iterator[CallCounter]:
    """Count in every thread of an engine and a server that are made meanwhile."""
    counter = CallCounter()
    threading.setprofile(counter)
    try:
        yield counter
    finally:
        threading.setprofile(None)


def test_a_warm_chat_of_one_token_goes_through_few_calls_and_files(
    counter: CallCounter, capsys: pytest.CaptureFixture[str]
):
    """Over HTTP, all of its prompt but the last token cached: the least of ten requests counts.

    A request may meet a step that began before it, or a timer; none can take fewer calls than it
    needs.
    """
    llm = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=64)
    body = {
        "model": "bard",
        "messages": [{"role": "user", "content": "Shall I compare thee to a summer's day?"}],
        "max_tokens": 1,
        "temperature": 0,
    }
    runs = list[Counter[str]]()
    with (
        serving(ServerState(llm, ServerConfig(model_names=("bard",)))) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for _ in range(12):
            with counter.counting():
                answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            runs.append(counter.calls.copy())
        usage = answer.json()["usage"]
    llm.shutdown()
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    least = min(runs[2:], key=lambda run: run.total())
    with capsys.disabled():
        print(f"\na warm chat: {least.total()} calls in {len(least)} files", end="")
    rooms = Counter[str]()
    for name, count in least.items():
        rooms[name.partition("/")[0]] += count
    assert least.total() <= MAX_CHAT_CALLS, least.most_common(60)
    assert len(least) <= MAX_CHAT_FILES, sorted(least)

"""Who may call an engine: one thread at a time, in the process that made it."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import ConcurrentCall
from tests.engine.loop.faults import sabotage
from tests.support.models.checkpoints import Checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [list(range(3 + start, 14 + start)) for start in range(48)]


class Interrupter:
    """Calls back in the middle of the first forward pass, in another thread, and waits for it."""

    def __init__(self, llm: LLM, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._hook = llm.engine.loaded.model.register_forward_pre_hook(self._interrupt)

    def _interrupt(self, *_: object) -> None:
        self._hook.remove()
        thread = threading.Thread(target=self._try)
        thread.start()
        thread.join()

    def _try(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error


@pytest.fixture
def plain_llm(checkpoints: Checkpoints) -> LLM:
    """Lend an engine whose model is called as a module, so that hooks run."""
    path = checkpoints.path("llama")
    return LLM(path, dtype="float64", block_size=4, num_blocks=64, forward="plain")


def test_calls_from_many_threads_are_served_alone_or_refused(llm: LLM):
    """48 calls from 8 threads: none is wrong, none breaks the engine, some run."""
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    def call(number: int) -> str:
        try:
            [output] = llm.generate([PROMPTS[number]], GREEDY, use_tqdm=False)
        except ConcurrentCall:
            return "refused"
        return "right" if output.outputs[0].token_ids == expected[number] else "wrong"

    with ThreadPoolExecutor(8) as pool:
        results = Counter(pool.map(call, range(len(PROMPTS))))

    assert set(results) <= {"right", "refused"} and results["right"]


def test_a_second_call_is_told_which_one_is_running_and_what_to_use(plain_llm: LLM):
    other = Interrupter(plain_llm, lambda: plain_llm.generate(PROMPTS[1], GREEDY, use_tqdm=False))

    [output] = plain_llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)

    assert len(output.outputs[0].token_ids) == 4
    assert isinstance(other.error, ConcurrentCall)
    assert "while generate() of thread 'MainThread' is running" in str(other.error)
    assert "AsyncLLM" in str(other.error)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False),
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.erase("ann"),
        lambda llm: llm.lease(PROMPTS[0]),
        lambda llm: llm.close(),
    ],
    ids=["chat", "reset_prefix_cache", "erase", "lease", "close"],
)
def test_whatever_changes_the_engine_waits_for_its_turn(call: Callable[[LLM], Any], plain_llm: LLM):
    other = Interrupter(plain_llm, lambda: call(plain_llm))

    plain_llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)

    assert isinstance(other.error, ConcurrentCall)


def test_counters_may_be_read_while_a_call_is_running(plain_llm: LLM):
    other = Interrupter(plain_llm, lambda: plain_llm.cache_stats.first.query_tokens)

    plain_llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)

    assert other.error is None


def test_another_thread_may_call_when_the_first_has_returned(llm: LLM):
    """Also when the first call failed."""
    with suppress(Exception), sabotage(llm):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)

    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(llm.generate, PROMPTS[:2], GREEDY, use_tqdm=False).result()

    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


FORK = """
import asyncio, os, sys, threading, torch
from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.errors import ForkedProcess

torch.set_num_threads(2)
SAY = SamplingParams(max_tokens=2, temperature=0)
PROMPT = "To be, or not to be " * 20

def answer(llm):
    return llm.generate(PROMPT, SAY, use_tqdm=False)[0].outputs[0].text

def refused(call):
    try:
        return repr(call())
    except ForkedProcess as error:
        return f"refused: {error}"

async def ask(llm):
    return [output async for output in llm.generate(PROMPT, SAY)][-1].outputs[0].text

llm, stream = LLM(num_blocks=64), AsyncLLM(num_blocks=64)
asyncio.run(stream.encode("To be"))
text = answer(llm)
child = os.fork()
if child == 0:
    print("same:", refused(lambda: answer(llm)))
    print("stream:", refused(lambda: asyncio.run(ask(stream))), stream.is_running)
    print("encode:", refused(lambda: asyncio.run(stream.encode("To be"))))
    print("new:", refused(lambda: answer(LLM(num_blocks=64))))
    torch.set_num_threads(1)
    print("one thread:", refused(lambda: answer(LLM(num_blocks=64)) == text))
    llm.close(), stream.shutdown()
    print("closed", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent:", answer(llm) == text == asyncio.run(ask(stream)))
"""


@pytest.mark.nightly
def test_a_forked_child_is_told_to_make_an_engine_of_its_own():
    """torch's threads stay behind in a fork; without the refusal the child waits forever."""
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    said = dict(line.partition(":")[::2] for line in done.stdout.splitlines())

    assert "is a fork of it, without its threads: start workers with" in said["same"]
    assert "get_context('spawn')" in said["stream"] and said["stream"].endswith(" False")
    assert "is a fork of it" in said["encode"]
    assert "torch.set_num_threads(1) before" in said["new"]
    assert (said["one thread"], said["parent"]) == (" True", " True")
    assert "closed" in said

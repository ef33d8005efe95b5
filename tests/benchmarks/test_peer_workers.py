"""Workers that run other engines: processes that are asked, and the slots of llama.cpp."""

import sys
from pathlib import Path

import pytest

from benchmarks.peers import engines
from benchmarks.peers.processes import NotSupported, WorkerFailed, WorkerProcess
from benchmarks.peers.protocol import serve_by_steps
from benchmarks.peers.workers.llamacpp import Slots, kv_type
from tests.support.waiting import wait_until


@pytest.fixture
def worker(tmp_path):
    """Our cache manager: a worker that loads in a moment."""
    python = Path(sys.executable)
    environment = engines.environment_of(engines.MANAGERS[0], python, 1)
    with WorkerProcess("manager_ours", python, environment, tmp_path / "log") as process:
        process.ask({"do": "load", "model": "", "settings": {}}, 60)
        yield process


def wait_until_stopped(stat):
    """The signal is sent at once; the kernel takes a moment."""
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_a_worker_is_asleep_unless_it_is_asked(worker):
    """Threads that spin while they wait would take the cores of the one that is measured."""
    stat = Path(f"/proc/{worker.pid}/stat")
    wait_until_stopped(stat)
    before = worker.cpu_seconds()
    size = {"prompt": 200_000, "seed": 1}
    assert worker.ask({"do": "manage", "scene": "miss", "size": size}, 60)["seconds"] > 0
    wait_until_stopped(stat)
    assert worker.cpu_seconds() > before


def test_what_an_engine_has_not_is_told_from_what_went_wrong(worker):
    with pytest.raises(NotSupported, match="serves no prompts"):
        worker.ask({"do": "serve", "talks": []}, 60)
    with pytest.raises(WorkerFailed, match="KeyError: 'prompt'"):
        worker.ask({"do": "manage", "scene": "hit", "size": {"seed": 1}}, 60)


def test_a_worker_that_does_not_answer_in_time_has_failed(worker):
    size = {"prompt": 2_000_000, "seed": 1}
    with pytest.raises(WorkerFailed, match="no answer"):
        worker.ask({"do": "manage", "scene": "miss", "size": size}, 0.01)


def test_a_worker_that_ends_leaves_its_last_words(tmp_path):
    python = Path(sys.executable)
    with (
        WorkerProcess("no_such_worker", python, {}, tmp_path / "log") as process,
        pytest.raises(WorkerFailed, match="no_such_worker"),
    ):
        process.ask({"do": "load", "model": "", "settings": {}}, 60)


def test_a_format_of_keys_that_llama_cpp_is_not_measured_with_is_named():
    """Nothing is loaded before that: the choices are told first."""
    with pytest.raises(ValueError, match=r"kv='q3': .* f16, bf16, Q8_0"):
        kv_type({"kv": "q3"})


class Echo:
    """An engine that answers each prompt with its length, a token per step, all by turns."""

    def __init__(self):
        self.prompts, self.left = [], {}

    def add(self, prompt, num_outputs):
        self.prompts.append(list(prompt))
        self.left[len(self.prompts)] = num_outputs
        return len(self.prompts)

    def poll(self):
        for name in [name for name, left in self.left.items() if left]:
            self.left[name] -= 1
            yield name, [len(self.prompts[name - 1])]


def test_a_turn_begins_with_all_that_was_said_before():
    """A conversation of two turns beside one of a single turn: own answers are in the prompt."""
    engine = Echo()
    served = serve_by_steps(engine, [[([1, 2], 2), ([3], 1)], [([4], 3)]])
    assert engine.prompts == [[1, 2], [4], [1, 2, 2, 2, 3]]
    assert served.outputs == [[2, 2], [1, 1, 1], [5]]
    assert served.tokens == [2, 3, 1]
    for first, last in zip(served.first, served.last, strict=True):
        assert 0 < first <= last <= served.seconds


class Cells:
    """llama.cpp's memory and its model: the next token is the position after the last."""

    lib = property(lambda self: self)
    memory = "memory"

    def __init__(self):
        self.shared, self.computed = [], []

    def llama_memory_seq_rm(self, memory, sequence, begin, end):
        pass

    def llama_memory_seq_cp(self, memory, source, goal, begin, end):
        self.shared.append((source, goal, end))

    def _decode(self, rows):
        self.computed += [token for token, *_ in rows]
        return [position + 1 for _, position, _, wanted in rows if wanted]


def test_llama_cpp_s_slots_compute_what_none_of_them_holds():
    """The second takes cells of the first, which is still busy; the third goes on with them."""
    cells = Cells()
    slots = Slots(cells, 2)
    slots.add([9, 9, 9, 1], 2)
    assert list(slots.poll()) == [(0, [4])]
    slots.add([9, 9, 9, 3], 1)
    assert cells.shared == [(0, 1, 3)]
    assert list(slots.poll()) == [(0, [5]), (1, [4])]

    slots.add([9, 9, 9, 3, 4, 2], 1)
    list(slots.poll())

    assert slots.cached == [0, 3, 4] and cells.shared == [(0, 1, 3)]
    assert cells.computed == [9, 9, 9, 1, 4, 3, 4, 2], "an answer's last token was never computed"

"""A share of a device's memory: what the model and its largest step leave goes to keys and values.

The memory is simulated; the model and its largest step are real, on a CPU.
"""

from collections.abc import Callable

import pytest

from ostinato import LLM
from ostinato.core.config import SchedulerConfig
from ostinato.core.plan import StepPlan, StepResult
from ostinato.engine.settings import setup
from ostinato.errors import ConfigError
from ostinato.runner.memory_share import MemoryShare, largest_step
from ostinato.runner.model_runner import ModelRunner
from tests.runner.conftest import Served

SCHEDULING = SchedulerConfig(max_num_batched_tokens=30, max_num_seqs=4, max_model_len=20)


class SimulatedMemory:
    """A device of 1,000,000 bytes, of which others have 100,000 and the model takes some."""

    total_bytes = 1_000_000

    def __init__(self, model_bytes: int = 300_000, step_bytes: int = 50_000) -> None:
        self.used_bytes, self.model_bytes, self.step_bytes = 100_000, model_bytes, step_bytes
        self.work: list[StepResult] = []

    def load(self) -> None:
        self.used_bytes += self.model_bytes

    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def peak_during(self, work: Callable[[], StepResult]) -> int:
        self.work.append(work())
        return self.step_bytes


def runner_of(served: Served, name: str = "llama") -> Callable[[int, int], ModelRunner]:
    return lambda num_blocks, num_slots: ModelRunner(
        served(name), num_blocks, 4, num_state_slots=num_slots
    )


def test_keys_and_values_get_what_weights_and_the_largest_step_leave(served: Served):
    """What others had before the start is no part of the share, as in vLLM."""
    memory = SimulatedMemory()
    share = MemoryShare(0.9, memory)
    memory.load()

    assert share.kv_bytes(runner_of(served), SCHEDULING, 4) == 900_000 - 300_000 - 50_000
    [result] = memory.work
    assert [len(sequence.samples) for sequence in result.sequences] == [1] * 4


def test_models_with_states_are_measured_with_them(served: Served):
    memory = SimulatedMemory()
    share = MemoryShare(0.9, memory)
    assert share.kv_bytes(runner_of(served, "mamba"), SCHEDULING, 4) == 850_000


@pytest.mark.parametrize(
    ("budget", "sequences", "longest", "lengths"),
    [
        (30, 4, 20, [9, 7, 7, 7]),
        (30, 4, 8, [8, 7, 7, 7]),
        (30, 30, 20, [1] * 30),
        (64, 1, 20, [20]),
    ],
)
def test_the_largest_step_has_all_sequences_and_tokens_that_a_plan_may_have(
    budget: int, sequences: int, longest: int, lengths: list[int]
):
    scheduling = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=sequences, max_model_len=longest
    )
    plan: StepPlan = largest_step(scheduling, 4, 1)

    assert [len(sequence.tokens) for sequence in plan.sequences] == lengths
    blocks = [block for sequence in plan.sequences for block in sequence.tables[0]]
    assert blocks == list(range(len(blocks)))
    assert all(len(s.tables[0]) == -(-len(s.tokens) // 4) for s in plan.sequences)


def test_a_share_that_others_use_is_refused_before_a_model_is_loaded():
    with pytest.raises(
        ConfigError, match=r"0\.95: that is 950,000 of 1,000,000 bytes, and only 900,"
    ):
        MemoryShare(0.95, SimulatedMemory())


def test_a_share_that_leaves_nothing_names_what_takes_it(served: Served):
    memory = SimulatedMemory(model_bytes=470_000)
    share = MemoryShare(0.5, memory)
    memory.load()

    with pytest.raises(ConfigError, match="model takes 470,000 and a step of 30 tokens 50,000"):
        share.kv_bytes(runner_of(served), SCHEDULING, 4)


def test_the_pool_of_an_engine_is_sized_by_its_share(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, but that the model computes on a CPU."""
    memory = SimulatedMemory(step_bytes=0)
    monkeypatch.setattr(setup, "memory_share", lambda config: MemoryShare(0.9, memory))
    with LLM(dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        loaded, config = llm.engine.loaded, llm.engine.config
        per_block = loaded.kv_spec.bytes_per_token(loaded.dtype) * config.block_size
        assert llm.engine.cache.manager.config.num_blocks == 900_000 // per_block
        assert len(memory.work) == 1

"""Whole steps through the runner's public interface."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StepPlan
from ostinato.runner.attention.torch_backend import TorchAttention, TorchStep
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.model_call import ModelCall
from ostinato.runner.model_runner import ModelRunner
from tests.runner.bench import Bench, generated_alone, own_logits, random_prompt
from tests.runner.conftest import Served

PROMPT = random_prompt(1, 21)


class FailsOnce(TorchAttention):
    """Attention that breaks down in the second layer of its first step."""

    broken = True

    def start(self, metadata: AttentionMetadata, store: KVStore) -> TorchStep:
        step = super().start(metadata, store)
        read = step.read

        def read_or_fail(layer: int, *rest: Any) -> Tensor:
            if self.broken and layer == 1:
                self.broken = False
                raise RuntimeError("the lights went out")
            return read(layer, *rest)

        step.read = read_or_fail  # type: ignore[assignment]
        return step


def test_results_come_in_the_plans_order_and_only_where_asked_for(served: Served):
    bench = Bench(served("llama"))
    first, second, third = (bench.sequence(random_prompt(s, 9)) for s in (1, 2, 3))

    result = bench.runner.execute(StepPlan((first.rest(), second.next(4), third.rest())))

    assert [len(r.samples) for r in result.sequences] == [1, 0, 1]
    assert all(r.prompt_logprobs == () for r in result.sequences)
    tokens = [generated_alone(bench.loaded, s.tokens, 1) for s in (first, third)]
    assert [r.samples[0].token_id for r in result.sequences if r.samples] == [t for [t] in tokens]


def test_a_step_that_fails_leaves_the_next_one_right(served: Served):
    """The very same step, tried again, gives what it should have given."""
    bench = Bench(served("llama"), attention=FailsOnce())
    sequence = bench.sequence(PROMPT)
    step = sequence.rest()

    with pytest.raises(RuntimeError, match="the lights went out"):
        bench.step(step)

    assert bench.runner.num_tokens_computed == 0
    assert bench.finish(sequence, bench.step(step)[0], 6) == generated_alone(
        bench.loaded, PROMPT, 6
    )


def test_only_rows_that_are_asked_for_get_logits(served: Served):
    """A prompt of a thousand tokens would else cost a thousand rows of the vocabulary."""
    bench = Bench(served("llama"))

    logits = bench.logits(bench.sequence(PROMPT).next(20), bench.sequence(PROMPT).rest())

    assert logits.shape == (1, 320)


def test_a_model_that_cannot_leave_out_logits_has_its_rows_selected(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    loaded = served("llama")
    expected = generated_alone(loaded, PROMPT, 1)
    own_forward = loaded.model.forward

    def gives_all(input_ids: Tensor, **keywords: Any) -> Any:
        assert "logits_to_keep" not in keywords
        return own_forward(input_ids=input_ids, **keywords)

    monkeypatch.setattr(loaded.model, "forward", gives_all)
    bench = Bench(replace(loaded, call=ModelCall(loaded.model)))

    assert bench.step(bench.sequence(PROMPT).rest()) == expected


def test_keys_may_be_kept_in_another_dtype_than_the_model_computes_in(served: Served):
    """Logits of a float32 model over bfloat16 keys are right to bfloat16."""
    loaded = served("llama", "float32")
    bench = Bench(loaded)
    bench.runner = ModelRunner(loaded, 64, 4, kv_dtype=torch.bfloat16)
    sequence = bench.sequence(PROMPT)
    sequence.blocks = list(range(16))

    bench.step(sequence.next(12))
    found = bench.logits(sequence.rest())[0]

    expected = own_logits(loaded, PROMPT)[-1]
    assert bench.runner.kv_stores[0].dtype == torch.bfloat16
    distance = (found - expected).square().mean().sqrt() / expected.std()
    assert 0 < distance < 0.2


def test_more_blocks_than_memory_are_refused(served: Served):
    with pytest.raises(ConfigError, match="lower num_blocks or kv_cache_memory"):
        ModelRunner(served("llama"), num_blocks=2**45, block_size=16)

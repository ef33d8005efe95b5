"""A step is one program: the same numbers as programs between calls of attention in Python."""

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LLM, SamplingParams
from ostinato.core.plan import CopyRun
from ostinato.runner.attention.native_backend import NativeAttention, NativePlan, NativeStep
from ostinato.runner.forward import fused
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.program import Attend, Copies, Copy, Program, Take, Write
from ostinato.runner.forward.weight_refs import replace_weights
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.ctypes_api import AttentionArgs, Kv
from ostinato.runner.native.library import library
from tests.runner.bench import Bench, logits_in_steps, own_logits, random_prompt
from tests.support.instruction_sets import needs_library, threads_in_use
from tests.support.models.checkpoints import Checkpoints
from tests.support.pairs import pairwise

NATIVE = library()
pytestmark = [needs_library, pytest.mark.usefixtures("module_isa")]

CASES = [(2, "bfloat16"), (1, "float32"), (2, "float32"), (1, "bfloat16")]
"""Threads and dtypes."""

TILED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Sizes that tiles divide; those of the other checkpoints they do not."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each program that is run has."""
    seen: list[int] = []
    run = Program.run

    def note(self: Program, num_rows: int, num_logit_rows: int, num_threads: int) -> None:
        seen.append(num_rows)
        run(self, num_rows, num_logit_rows, num_threads)

    monkeypatch.setattr(Program, "run", note)
    return seen


def bench_of(loaded: LoadedModel) -> Bench:
    assert NATIVE is not None
    return Bench(loaded, block_size=16, attention=NativeAttention(NATIVE))


def small_steps(loaded: LoadedModel) -> Tensor:
    return logits_in_steps(bench_of(loaded), random_prompt(1, 31), (7, 1, 15, 1, 7))


def with_attention_called_apart(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "native_steps", lambda *_: {})
        return compute()


@pytest.mark.one_case_in(2)
@pairwise("kind", KINDS, "case", CASES)
def test_a_program_gives_the_very_logits_of_programs_between_calls_of_attention(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    programs: list[int],
    kind: str,
    case: tuple[int, Any],
):
    threads, dtype = case
    family, changes = KINDS[kind]
    path = checkpoints.path(family, **changes)
    loaded = load_model(path, dtype)
    assert isinstance(loaded.fused, FusedForward)
    assert programs, "the probe's steps went through it"
    plain = own_logits(load_model(path, dtype, forward="plain"), random_prompt(1, 31))
    programs.clear()
    with threads_in_use(threads):
        found = small_steps(loaded)
        assert programs == [14, 2, 30, 2, 14]
        expected = with_attention_called_apart(monkeypatch, lambda: small_steps(loaded))
    assert torch.equal(found, expected)
    tolerance = 1e-4 if dtype == "float32" else 0.15
    assert (found - plain).abs().max() <= tolerance * plain.std()


def test_new_weights_and_biases_are_computed_with(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, programs: list[int]
):
    """A program points to weights, which are overwritten where they lie."""
    loaded = load_model(checkpoints.path("llama", attention_bias=True, **TILED), "bfloat16")
    old = small_steps(loaded)
    weights = loaded.model.state_dict()
    projections = ("k_proj", "down_proj", "norm")
    new = {n: -w for n, w in weights.items() if any(name in n for name in projections)}
    assert any(name.endswith("k_proj.bias") for name in new)

    replace_weights(loaded.model, new)

    programs.clear()
    found = small_steps(loaded)
    assert programs
    assert not torch.equal(found, old)
    assert torch.equal(found, with_attention_called_apart(monkeypatch, lambda: small_steps(loaded)))


def test_runners_take_turns(checkpoints: Checkpoints):
    """A program is laid down on one store; the next step may be on another."""
    loaded = load_model(checkpoints.path("qwen3", **TILED), "bfloat16")
    prompt = random_prompt(3, 20)
    expected = own_logits(loaded, prompt)[-1]
    benches = [bench_of(loaded) for _ in range(2)]
    sequences = [bench.sequence(prompt) for bench in benches]
    for bench, sequence in zip(benches, sequences, strict=True):
        bench.logits(sequence.next(19))
    for bench, sequence in zip(benches, sequences, strict=True):
        (found,) = bench.logits(sequence.rest())
        assert (found - expected).abs().max() <= 0.05 * expected.std()


def test_layers_of_several_groups_have_stores_and_slots_of_their_own(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, programs: list[int]
):
    family, changes = KINDS["windows"]
    path = str(checkpoints.path(family, **TILED, **changes))
    params = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False, ignore_eos=True)

    def answer() -> list[int]:
        llm = LLM(path, dtype="bfloat16", num_blocks=32, block_size=16)
        assert llm.engine.runner.groups.num_groups == 2
        programs.clear()
        [output] = llm.generate(random_prompt(5, 24), params, use_tqdm=False)
        assert programs
        llm.close()
        return output.outputs[0].token_ids

    assert answer() == with_attention_called_apart(monkeypatch, answer)


def copying_steps(loaded: LoadedModel) -> Tensor:
    """Logits of one who goes on in the middle of a block that is computed in the same step."""
    bench, prompt = bench_of(loaded), random_prompt(6, 30)
    leader = bench.sequence(prompt)
    follower = bench.sequence([*prompt[:21], 9, 8, 7], shared=leader.blocks[:1], computed=21)
    copy = CopyRun(bench.slot(leader, 16), bench.slot(follower, 16), 5)
    bench.step(leader.rest(), follower.next(2), copies=[copy])
    return bench.logits(follower.rest())[0].clone()


def test_slots_are_copied_once_they_are_written_and_before_they_are_read(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, programs: list[int]
):
    loaded = load_model(checkpoints.path("qwen3", **TILED), "bfloat16")
    programs.clear()
    found = copying_steps(loaded)
    assert programs == [32, 1]
    expected = with_attention_called_apart(monkeypatch, lambda: copying_steps(loaded))
    assert torch.equal(found, expected)
    expected = own_logits(loaded, [*random_prompt(6, 30)[:21], 9, 8, 7])[-1]
    assert (found - expected).abs().max() <= 0.1 * expected.std()


def long_step(loaded: LoadedModel, num_tokens: int) -> Tensor:
    """Logits of every third token of a prompt, and what the next token sees of its keys."""
    bench, prompt = bench_of(loaded), random_prompt(11, num_tokens + 1)
    sequence = bench.sequence(prompt)
    step = replace(sequence.next(num_tokens), prompt_targets=array("I", [0] * num_tokens))
    whole = bench.logits(step)[::3].clone()
    return torch.cat((whole, bench.logits(sequence.rest())))


@pytest.mark.one_case_in(2)
@pairwise("kind", KINDS, "threads", [1, 2])
def test_a_long_step_goes_through_its_program_in_chunks_and_gives_the_same_logits(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    programs: list[int],
    kind: str,
    threads: int,
):
    """150 rows: in chunks of 32, where the last has 22; of 96, which come out as 96 and 54; whole;
    and in programs between calls of attention."""
    family, changes = KINDS[kind]
    loaded = load_model(checkpoints.path(family, **TILED, **changes), "bfloat16")
    found = []
    with threads_in_use(threads):
        for rows_per_chunk in (32, 96, 256):
            monkeypatch.setattr(fused, "ROWS_PER_CHUNK", rows_per_chunk)
            programs.clear()
            found.append(long_step(loaded, 150))
            assert programs == [150, 1]
        expected = with_attention_called_apart(monkeypatch, lambda: long_step(loaded, 150))
    assert all(torch.equal(one, expected) for one in found)


def test_a_program_is_laid_down_anew_for_a_step_that_it_has_no_room_for(
    checkpoints: Checkpoints, programs: list[int]
):
    """Small, long, and small again, as if each were alone."""
    loaded = load_model(checkpoints.path("qwen3", **TILED), "bfloat16")
    prompt = random_prompt(12, 200)
    bench = bench_of(loaded)
    sequence = bench.sequence(prompt)
    programs.clear()
    for length in (20, 129, 50):
        bench.step(sequence.next(length))
    (found,) = bench.logits(sequence.rest())
    assert programs == [20, 129, 50, 1]
    expected = own_logits(loaded, prompt)[-1]
    assert (found - expected).abs().max() <= 0.1 * expected.std()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("vocab_size", [320, 350])
def test_rows_without_wanted_logits_end_behind_the_last_attention(
    checkpoints: Checkpoints, programs: list[int], vocab_size: int
):
    """Whether tiles divide the vocabulary, or not."""
    path = checkpoints.path("qwen3", **TILED, vocab_size=vocab_size)
    loaded = load_model(path, "bfloat16")
    prompt = random_prompt(8, 20)
    everything = bench_of(loaded)
    step = everything.sequence(prompt).next(20)
    whole = everything.logits(replace(step, prompt_targets=array("I", [0] * 20)))
    programs.clear()
    bench = bench_of(loaded)
    two = bench.logits(bench.sequence(prompt).rest(), bench.sequence(prompt).rest())
    none = bench.logits(bench.sequence(prompt).next(20))
    assert programs == [40, 20]
    assert two.shape == (2, vocab_size) and none.shape == (0, vocab_size)
    assert torch.equal(two, whole[-1:].expand(2, -1))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["qwen3", "windows"])
def test_the_last_attention_computes_only_rows_whose_logits_are_read(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """A decode, a chunk that samples, one with targets in its middle, and one with neither."""
    family, changes = KINDS[kind]
    loaded = load_model(checkpoints.path(family, **changes), "bfloat16")
    planned, plan = [], NativeStep.plan

    def note(*args: Any) -> NativePlan:
        planned.append(plan(*args))
        return planned[-1]

    def logits() -> Tensor:
        bench = bench_of(loaded)
        decoded = bench.sequence(random_prompt(4, 21))
        bench.logits(decoded.next(20))
        targets = bench.sequence(random_prompt(5, 30)).next(30)
        targets = replace(targets, prompt_targets=array("I", [7] * 3), first_target=11)
        others = bench.sequence(random_prompt(6, 19)).rest(), bench.sequence([5] * 9).next(9)
        return bench.logits(decoded.rest(), others[0], targets, others[1])

    with monkeypatch.context() as patch:
        patch.setattr(NativeStep, "plan", note)
        found = logits()
    rows = [each.laid.num_rows for each in planned]
    assert rows == [20, 59, 5], "the first step has no logits: its last attention is left out"
    assert torch.equal(found, with_attention_called_apart(monkeypatch, logits))


def test_a_hook_on_the_embedding_sees_the_tokens_of_small_steps(
    checkpoints: Checkpoints, programs: list[int]
):
    loaded = load_model(checkpoints.path("qwen3", **TILED), "bfloat16")
    prompt, seen = random_prompt(9, 12), []
    bench = bench_of(loaded)
    expected = bench.logits(bench.sequence(prompt).rest())
    embedding = loaded.model.get_input_embeddings()
    with embedding.register_forward_hook(
        lambda _module, given, _: seen.extend(given[0][0].tolist())
    ):
        programs.clear()
        found = bench.logits(bench.sequence(prompt).rest())
    assert programs == [12] and seen == prompt
    assert torch.equal(found, expected)


def test_records_are_as_large_as_the_headers():
    assert ctypes.sizeof(Write) == 128
    assert ctypes.sizeof(Copy) == ctypes.sizeof(Kv) + 8
    assert ctypes.sizeof(Copies) == 24
    assert ctypes.sizeof(Take) == 56
    assert ctypes.sizeof(Attend) == ctypes.sizeof(AttentionArgs) + 8

"""Whole steps: one copy of tables, replayed graphs, sampling in the step, the next plan ahead.

The same functions run here that run on a GPU. In place of a CUDA graph, the captured step itself is
run again, with its own tensors and numbers, so that whatever is neither in a table at a fixed
address nor in the key gives wrong tokens.
"""

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato import LLM, SamplingParams
from ostinato.core import sampling_params
from ostinato.core.ids import SequenceId
from ostinato.core.plan import SampleTask, ScheduledSequence, StepPlan
from ostinato.runner.forward.packing import unpack_linears
from ostinato.runner.forward.structure import describe_decoder, pack_decoder
from ostinato.runner.gpu.attention_step import TritonKVStore
from ostinato.runner.gpu.backend import TritonAttention
from ostinato.runner.gpu.device_forward import DeviceForward
from ostinato.runner.gpu.device_sampling import sample_in_step, sampling_kind, sampling_tables
from ostinato.runner.gpu.device_steps import DeviceSteps
from ostinato.runner.gpu.device_weights import DevicePack
from ostinato.runner.gpu.read_parts import plan_parts
from ostinato.runner.gpu.read_planner import LayerKind, ReadPlanner, next_decodes
from ostinato.runner.gpu.step_graphs import Step, StepGraphs, StepTensors
from ostinato.runner.gpu.step_tables import DeviceTables
from ostinato.runner.inputs import build_inputs
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.sampling.sampler import Sampler
from ostinato.runner.select_forward import ChosenForward
from tests.runner.bench import Bench, HandSequence, generated_alone, random_prompt
from tests.runner.gpu.test_attention import multiply_in_float64
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.triton import needs_triton

__all__ = ["checkpoints"]

pytestmark = needs_triton

HEAD = random_prompt(3, 12)
PROMPTS = [[*HEAD, *random_prompt(seed, 3 + seed)] for seed in range(3)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One layer with one head of keys: Triton's interpreter takes a second for four programs."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("one_layer")
    LlamaForCausalLM(config).save_pretrained(path)
    return on_device(load_model(path, "float32", forward="plain"))


def on_device(loaded: LoadedModel, same_bits: bool = False) -> LoadedModel:
    """Fuse a model as for a device, without the comparison of logits."""
    decoder = describe_decoder(loaded.model, for_device=True)
    with torch.no_grad():
        pack_decoder(loaded.model, decoder, DevicePack(None, same_bits))
    fused = DeviceForward(decoder, loaded.call, same_bits)
    return replace(loaded, forward=ChosenForward("fused", "", fused))


def steps_of(bench: Bench) -> DeviceSteps:
    steps = bench.runner.whole_steps
    assert isinstance(steps, DeviceSteps)
    return steps


def bench_with_graphs(loaded: LoadedModel) -> tuple[Bench, DeviceSteps, list[StepTensors]]:
    """A workbench whose steps are replayed, and the results of its replays."""
    bench, results = Bench(loaded, attention=TritonAttention("always")), list[StepTensors]()
    steps = steps_of(bench)
    steps.graphs = StepGraphs(lambda step: lambda: results.append(step()) or results[-1])
    return bench, steps, results


def prefilled(bench: Bench) -> list[HandSequence]:
    """Three sequences on three shared blocks, their prompts computed, one token sampled."""
    sequences = [bench.sequence(PROMPTS[0])]
    sequences += [
        bench.sequence(prompt, shared=sequences[0].blocks[:3], computed=12)
        for prompt in PROMPTS[1:]
    ]
    first = bench.step(sequences[0].rest())
    for sequence, token in zip(
        sequences, first + bench.step(*(s.rest() for s in sequences[1:])), strict=True
    ):
        sequence.tokens.append(token)
    return sequences


def decode(bench: Bench, sequences: list[HandSequence]) -> None:
    for sequence, token in zip(sequences, bench.step(*(s.rest() for s in sequences)), strict=True):
        sequence.tokens.append(token)


def test_replayed_decodes_give_the_tokens_of_each_sequence_alone(loaded: LoadedModel):
    """Three rows are padded to four; lengths, tables and tokens change from replay to replay.

    Each step copies its tables once. The next one is planned while it runs, for the same sequences;
    where one has ended, the step is planned anew.
    """
    bench, steps, results = bench_with_graphs(loaded)
    sequences, ahead, copies = prefilled(bench), [], []
    for rows in (sequences, sequences, sequences, sequences[:2], sequences[:2]):
        before, copied = steps.planner.num_ahead, steps.tables.num_copies
        decode(bench, rows)
        ahead.append(steps.planner.num_ahead - before)
        copies.append(steps.tables.num_copies - copied)

    assert (ahead, copies) == ([0, 1, 1, 0, 1], [1] * 5)
    assert steps.graphs.num_replays == len(results) == 3  # the first of each size runs uncaptured
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        answer = sequence.tokens[len(prompt) :]
        assert answer == generated_alone(loaded, prompt, len(answer))
    assert [len(result.logits) for result in results] == [4, 4, 2]
    assert all(result.logits.isfinite().all() for result in results), "padding rows give numbers"
    [store] = bench.runner.kv_stores
    assert isinstance(store, TritonKVStore)
    padding = [rows[-1].any().item() for rows in store.block_rows()]
    assert padding == [False, False], "padding rows are not stored"


@pytest.mark.nightly
def test_a_mixed_step_copies_its_tables_once(loaded: LoadedModel):
    """Decodes beside a chunk that samples nothing, then beside the rest of that prompt."""
    bench, steps, _ = bench_with_graphs(loaded)
    sequences, late = prefilled(bench), bench.sequence(random_prompt(9, 9))
    for other in ((late.next(5),), (late.rest(),)):
        before = steps.tables.num_copies
        tokens = bench.step(*(s.rest() for s in sequences), *other)
        for sequence, token in zip(sequences, tokens, strict=False):
            sequence.tokens.append(token)
        assert steps.tables.num_copies == before + 1
    late.tokens.append(tokens[-1])
    assert late.tokens[9:] == generated_alone(loaded, late.tokens[:9], 1)


def test_a_block_that_is_to_be_allocated_is_no_part_of_a_prediction():
    """Tables of the engine grow by a block where a sequence has filled its last one."""
    tables = array("I", [5, 6]), array("I", [5, 9])
    rows = [ScheduledSequence(SequenceId(n), array("I", [1]), 7 - n, (t,), task(0))
            for n, t in enumerate(tables)]  # fmt: skip
    metadata = build_inputs(StepPlan(tuple(rows)), 4, torch.device("cpu")).groups[0]
    planner, kinds = ReadPlanner(True, False), (LayerKind(2, 64, 2, None),)
    planner.plan_ahead(0, metadata, kinds)
    following = next_decodes(metadata)
    assert following.first_positions.tolist() == [8, 7]
    assert following.blocks.tolist() == [5, 6, -1, 5, 9]
    assert following.table_starts.tolist() == [0, 3, 5]

    for blocks, is_ahead in (([5, 6, 2, 5, 9], True), ([5, 6, 2, 5, 8], False)):
        planner.plan_ahead(0, metadata, kinds)
        step = replace(following, blocks=np.array(blocks))
        before = planner.num_ahead
        parts = planner.plan(0, step, kinds)[kinds[0]]
        expected = plan_parts(step, planner.limits(kinds[0]), None, True)
        assert planner.num_ahead == before + is_ahead
        assert all(map(np.array_equal, parts.arrays(), expected.arrays()))


@pytest.mark.nightly
def test_a_row_of_a_model_has_the_same_bits_alone_and_in_a_batch(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """A decode of three, whose prompts were computed in chunks, and its first row alone.

    As in the tests of kernels, the interpreter multiplies in float64, and rounds once.
    """
    monkeypatch.setattr(np, "matmul", multiply_in_float64)
    unpack_linears(loaded.model)
    exact = on_device(loaded, same_bits=True)
    logits = []
    for prompts, lengths in ((PROMPTS, (5, 4)), (PROMPTS[:1], ())):
        bench = Bench(exact, attention=TritonAttention("always", same_bits=True))
        sequences = [bench.sequence([*prompt, 9]) for prompt in prompts]
        for length in lengths:
            bench.step(*(s.next(length) for s in sequences))
        bench.step(*(s.next(len(s.tokens) - s.computed - 1) for s in sequences))
        logits.append(bench.logits(*(s.rest() for s in sequences))[0])
    assert torch.equal(*logits)


@pytest.mark.nightly
def test_larger_tables_move_and_graphs_are_captured_again(loaded: LoadedModel):
    bench, steps, _ = bench_with_graphs(loaded)
    steps.tables = DeviceTables(torch.device("cpu"), 64)
    sequences = prefilled(bench)
    decode(bench, sequences)
    decode(bench, sequences)
    moves = steps.tables.num_moves
    late = bench.sequence(random_prompt(5, 260), room=4)
    late.tokens.append(bench.step(late.rest())[0])

    for _ in range(2):
        decode(bench, [*sequences, late])

    assert steps.tables.num_moves > moves > 0
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.tokens[len(prompt) :] == generated_alone(loaded, prompt, 5)


def test_a_model_that_cannot_be_captured_runs_uncaptured(caplog: pytest.LogCaptureFixture):
    def refuse(step: Step) -> Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, result = StepGraphs(refuse), StepTensors(torch.zeros(1, 1), None)
    for _ in range(4):
        assert graphs.run("key", lambda: result) is result

    assert graphs.num_replays == 0
    assert caplog.text.count("not captured in CUDA graphs: operation not permitted") == 1


def test_tables_of_equal_shapes_are_at_equal_addresses():
    """Whatever was copied in between; other shapes are not, and each view is aligned."""
    tables = DeviceTables(torch.device("cpu"))
    one: dict[str, np.ndarray] = {
        "ids": np.arange(5),
        "blocks": np.arange(3, dtype=np.int32),
        "p": np.array([0.5]),
    }
    views = tables.put(one)
    assert all(np.array_equal(views[name].numpy(), one[name]) for name in one)
    addresses = {name: view.data_ptr() for name, view in views.items()}
    tables.put({"ids": np.arange(99), "more": np.zeros((4, 6), dtype=np.int32)})

    again = tables.put({name: array + 1 for name, array in one.items()})

    assert {name: view.data_ptr() for name, view in again.items()} == addresses
    assert (tables.num_copies, tables.num_moves) == (3, 0)
    assert views["ids"].tolist() == [1, 2, 3, 4, 5], "the old views see the new tables"
    assert all(address % 16 == 0 for address in addresses.values())


def task(number: int, **params) -> SampleTask:
    return SampleTask(
        sampling_params.SamplingParams(**params),
        (number,),
        array("I", [0]),
        array("I", [7] * number),
    )


KINDS = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "both": {"temperature": 0.7, "top_k": 9, "top_p": 0.4, "min_p": 0.05},
    "none": {"temperature": 1.0, "top_p": 1e-9},
}


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_in_the_step_draws_what_the_sampler_draws(kind: str):
    """Beside rows of every kind, and with many equal logits, so that ties matter."""
    draw = torch.Generator().manual_seed(len(kind))
    tasks = [task(n, **KINDS[kind]) for n in range(40)]
    tasks += [task(n, **params) for n, params in enumerate(KINDS.values())] * (kind == "both")
    vocab = 50
    logits = torch.randn(len(tasks), vocab, generator=draw).mul(3).round().to(torch.bfloat16)
    logits[5] = torch.nan

    how = sampling_kind(tasks, vocab)
    assert how is not None
    arrays = sampling_tables(how, tasks, vocab, len(tasks))
    tables = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ids = sample_in_step(logits, how, tables).tolist()

    expected = Sampler().sample(logits.double(), tasks)  # in torch, not in the native library
    assert ids[5] == -1 and "NaN" in expected[5][0].error
    del ids[5], expected[5]
    assert ids == [token.token_id for (token,) in expected]
    assert len(set(ids)) > 1


def test_what_a_step_cannot_sample_is_left_to_the_sampler():
    """Log-probabilities, several samples, edits of logits, and more rows than fit."""
    lists = [
        {"logprobs": 2}, {"logit_bias": {5: 1.0}}, {"min_tokens": 1, "stop_token_ids": (3,)},
        {"repetition_penalty": 1.5}, {"allowed_token_ids": (1, 2)},
    ]  # fmt: skip
    for params in lists:
        assert sampling_kind([task(0, **params)], 320) is None, params
    many = replace(task(0), seeds=(1, 2))
    assert sampling_kind([many], 320) is None
    assert sampling_kind([task(0, temperature=0.5)] * 9, 2**20) is None, "scratch memory"


@pytest.mark.nightly
def test_a_whole_engine_answers_as_with_plain_torch(checkpoints: Checkpoints):
    """Growing tables, requests that end at different times, and every kind of sampling."""
    params = [
        SamplingParams(max_tokens=3 + 4 * n, ignore_eos=True, seed=n, detokenize=False, **how)
        for n, how in enumerate([{"temperature": 0.0}, *list(KINDS.values())[1:4], {"logprobs": 1}])
    ]
    prompts = [{"prompt_token_ids": [*HEAD, *random_prompt(n, 2 + n)]} for n in range(len(params))]
    answers = []
    for attention in ("triton", "torch"):
        with LLM(
            str(checkpoints.path("llama")), dtype="float32", attention=attention, forward="plain",
            num_blocks=64, block_size=4, drafts="off",
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            if attention == "triton":
                steps = llm.engine.runner.whole_steps
                assert isinstance(steps, DeviceSteps)
                assert steps.planner.num_ahead > 5
    assert answers[0] == answers[1]

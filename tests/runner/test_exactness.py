"""Whatever a step looks like, the tokens are those of ``generate``.

In float64, greedily, on tiny models; prompts are longer than their windows. The same situations are
met by every family through the public interface in ``tests/exactness``; here they are steps made by
hand, on a model of each kind of attention.
"""

import pytest
import torch

from ostinato.core.plan import CopyRun
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import ScratchLimits, TorchAttention
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.native.library import library
from tests.runner.bench import Bench, generated_alone, own_logits, random_prompt
from tests.runner.conftest import Served
from tests.support.model_families import FAMILIES
from tests.support.pairs import pairwise

pytestmark = pytest.mark.one_case_in(3)

NUM_NEW = 8

every_family = pytest.mark.parametrize("family", FAMILIES)
each_kind = pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
"""Plain attention, windows and soft caps, sinks, and keys longer than values."""


@each_kind
def test_a_prompt_in_two_chunks_and_scattered_blocks_decodes_like_generate(family, served: Served):
    """37 tokens in chunks of 13 and 24, which no block size divides, then one at a time."""
    loaded = served(family)
    prompt = random_prompt(1, 37)
    bench = Bench(loaded)
    sequence = bench.sequence(prompt)

    assert bench.step(sequence.next(13)) == [None]
    generated = bench.finish(sequence, bench.step(sequence.rest())[0], NUM_NEW)

    assert generated == generated_alone(loaded, prompt, NUM_NEW)


@each_kind
def test_strangers_in_one_step_do_not_notice_each_other(family: str, served: Served):
    """One decodes, one is in the middle of its prompt, one is new, one samples at once."""
    loaded = served(family)
    prompts = [random_prompt(seed, length) for seed, length in enumerate((21, 40, 9, 30))]
    bench = Bench(loaded)
    decoding, chunked, new, whole = (bench.sequence(prompt) for prompt in prompts)
    first, _ = bench.step(decoding.rest(), chunked.next(11))
    assert first is not None
    decoding.tokens.append(first)

    sampled = bench.step(decoding.rest(), chunked.next(14), new.next(5), whole.rest())
    assert sampled[1:3] == [None, None]
    tokens = [
        [first, *bench.finish(decoding, sampled[0], NUM_NEW)],
        bench.finish(chunked, bench.step(chunked.rest())[0], NUM_NEW),
        bench.finish(new, bench.step(new.rest())[0], NUM_NEW),
        bench.finish(whole, sampled[3], NUM_NEW),
    ]

    assert tokens[0] == generated_alone(loaded, prompts[0], NUM_NEW + 1)
    for prompt, generated in zip(prompts[1:], tokens[1:], strict=True):
        assert generated == generated_alone(loaded, prompt, NUM_NEW)


@each_kind
def test_a_follower_reads_blocks_that_its_leader_writes_in_the_same_step(family, served: Served):
    """Law 1: 16 tokens in common, both prompts new, one step; they are computed once."""
    loaded = served(family)
    common = random_prompt(2, 16)
    prompts = common + random_prompt(3, 7), common + random_prompt(4, 11)
    bench = Bench(loaded)
    leader = bench.sequence(prompts[0])
    follower = bench.sequence(prompts[1], shared=leader.blocks[:4], computed=16)

    sampled = bench.step(follower.rest(), leader.rest())

    assert bench.runner.num_tokens_computed == 16 + 7 + 11
    assert bench.finish(follower, sampled[0], NUM_NEW) == generated_alone(
        loaded, prompts[1], NUM_NEW
    )
    assert bench.finish(leader, sampled[1], NUM_NEW) == generated_alone(loaded, prompts[0], NUM_NEW)


@each_kind
def test_a_follower_copies_slots_that_its_leader_writes_in_the_same_step(family, served: Served):
    """21 tokens in common: five blocks are shared, the one slot of the sixth is copied."""
    loaded = served(family)
    common = random_prompt(5, 21)
    prompts = common + random_prompt(6, 7), common + random_prompt(7, 3)
    bench = Bench(loaded)
    leader = bench.sequence(prompts[0])
    follower = bench.sequence(prompts[1], shared=leader.blocks[:5], computed=21)
    copy = CopyRun(bench.slot(leader, 20), bench.slot(follower, 20), 1)

    sampled = bench.step(follower.rest(), leader.rest(), copies=[copy])

    assert bench.finish(follower, sampled[0], NUM_NEW) == generated_alone(
        loaded, prompts[1], NUM_NEW
    )
    assert bench.finish(leader, sampled[1], NUM_NEW) == generated_alone(loaded, prompts[0], NUM_NEW)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_copy_of_a_copy_in_one_step_brings_what_the_first_one_does(family: str, served: Served):
    """A computes, B copies from A, and C copies from B what B has only copied itself."""
    loaded = served(family)
    common = random_prompt(8, 22)
    bench = Bench(loaded)
    prompts = [common + random_prompt(seed, 3) for seed in (9, 10, 11)]
    a = bench.sequence(prompts[0])
    b = bench.sequence(prompts[1], shared=a.blocks[:5], computed=22)
    c = bench.sequence(prompts[2], shared=a.blocks[:5], computed=22)
    copies = [
        CopyRun(bench.slot(b, 20), bench.slot(c, 20), 2),
        CopyRun(bench.slot(a, 20), bench.slot(b, 20), 2),
    ]

    sampled = bench.step(a.rest(), b.rest(), c.rest(), copies=copies)

    for sequence, prompt, token in zip((a, b, c), prompts, sampled, strict=True):
        assert bench.finish(sequence, token, NUM_NEW) == generated_alone(loaded, prompt, NUM_NEW)


@every_family
def test_tiny_scratch_memory_changes_nothing(family: str, served: Served):
    """Contexts are read in tiles of a block or two, queries in slices, batches one by one."""
    loaded = served(family)
    prompts = random_prompt(12, 37), random_prompt(13, 34)
    scratch = ScratchLimits(gather_bytes=2000, fused_bytes=2000, score_bytes=500, mask_memo_bytes=0)
    bench = Bench(loaded, attention=TorchAttention(scratch))
    sequences = [bench.sequence(prompt) for prompt in prompts]

    bench.step(*(sequence.next(9) for sequence in sequences))
    sampled = bench.step(*(sequence.rest() for sequence in sequences))

    for sequence, prompt, token in zip(sequences, prompts, sampled, strict=True):
        assert bench.finish(sequence, token, NUM_NEW) == generated_alone(loaded, prompt, NUM_NEW)


def native_bench(loaded: LoadedModel) -> Bench:
    """A bench on the native library, whose blocks hold sixteen tokens."""
    native = library()
    if native is None:
        pytest.skip("the native library is not built")
    return Bench(loaded, num_blocks=24, block_size=16, attention=NativeAttention(native))


TOLERANCES = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.2}


@every_family
def test_logits_are_those_of_the_models_own_attention(family: str, served: Served):
    check_logits(Bench(served(family, "float64")))


@pairwise("family", FAMILIES, "dtype", ["float32", "bfloat16"])
def test_rounded_logits_are_those_of_the_models_own_attention(family, dtype, served: Served):
    check_logits(Bench(served(family, dtype)))


@pairwise("family", FAMILIES, "dtype", ["bfloat16", "float32"])
def test_logits_of_the_native_library_are_those_of_the_models_own_attention(
    family: str, dtype: str, served: Served
):
    check_logits(native_bench(served(family, dtype)))


def check_logits(bench: Bench) -> None:
    """Compare logits in a prompt, token by token, with those of the whole prompt at once.

    The model's own softmax and RoPE are in float32, whence 1e-5 in float64.
    Distances are measured in standard deviations of a row's logits; in bfloat16 the median
    row is held to it, since an expert that wins by a tie's breadth can turn a row over.
    """
    prompt, loaded = random_prompt(14, 33), bench.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    sequence = bench.sequence(prompt)
    bench.step(sequence.next(10))
    sequence.computed = 10

    found = torch.cat([bench.logits(sequence.next(1, sample=True)) for _ in range(23)]).double()

    expected = own_logits(loaded, prompt)[10:].double()
    distance = (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)
    assert distance.quantile(0.5 if dtype == "bfloat16" else 1.0) < TOLERANCES[dtype]

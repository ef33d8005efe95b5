"""What a model takes on a GPU follows from its config, and is near what others measured."""

from array import array

import numpy as np
import pytest

from ostinato.core.errors import ConfigError
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.lab.size.gpus import DENSE_SHARE, GIB, MOE_SHARE, find_gpu
from ostinato.lab.work.model_work import AttentionGroup, model_work, weight_format
from ostinato.lab.work.roofline import Machine, RooflineCost, choose_machine
from tests.lab.size import known_configs as known

NOTHING = np.zeros(1)


def cost_of(name: str, gpu: str, num_gpus: int, weights: str = "auto", kv: str = "auto"):
    work = model_work(getattr(known, name), weights, kv)
    return RooflineCost(work, Machine(find_gpu(gpu), num_gpus))


def output_rate(cost: RooflineCost, num_input: int, num_output: int) -> float:
    """Output tokens per second of a machine that is always busy."""
    inputs, outputs = np.array([float(num_input)]), np.array([float(num_output)])
    seconds = cost.prefill_s(inputs, NOTHING) + cost.decode_s(inputs, outputs)
    return num_output / float(seconds[0])


# NVIDIA, TensorRT-LLM 1.0, "Performance overview": total output tokens/s at maximum load, FP8.
# Llama 3.1 8B and Qwen3-235B are those that the shares of peak were fitted to.
PUBLISHED = [
    ("LLAMA_3_1_8B", "h100", 1, {(2048, 128): 3450, (5000, 500): 3459, (1000, 1000): 15220}),
    ("LLAMA_3_1_8B", "h200", 1, {(2048, 128): 3538, (5000, 500): 3902, (1000, 1000): 17744}),
    ("LLAMA_3_1_70B", "h100", 2, {(2048, 128): 762, (5000, 500): 898, (1000, 1000): 4205}),
    ("LLAMA_3_1_70B", "h200", 1, {(2048, 128): 442, (5000, 500): 566, (1000, 1000): 2909}),
    ("LLAMA_3_1_405B", "h100", 8, {(2048, 128): 453, (5000, 500): 610, (1000, 1000): 2919}),
    ("QWEN3_235B_A22B", "h100", 8, {(5000, 500): 3225, (1000, 1000): 14898}),
    ("QWEN3_235B_A22B", "h200", 8, {(2048, 128): 3331, (5000, 500): 3623}),
]


@pytest.mark.parametrize(("name", "gpu", "num_gpus", "rates"), PUBLISHED)
def test_throughput_is_within_a_fifth_of_what_nvidia_publishes(name, gpu, num_gpus, rates):
    cost = cost_of(name, gpu, num_gpus, "fp8", "fp8")
    for (num_input, num_output), rate in rates.items():
        assert output_rate(cost, num_input, num_output) == pytest.approx(rate, rel=0.2)


def test_deepseeks_prefill_is_within_a_fifth_of_what_lmsys_publishes():
    """52,300 input tokens/s per node of 8 H100 for prompts of 2,000; 4 nodes are one replica.

    Source: LMSYS, "Deploying DeepSeek with PD Disaggregation and Large-Scale Expert Parallelism on
    96 H100 GPUs", 2025-05-05.
    """
    cost = cost_of("DEEPSEEK_V3", "h100", 32)
    [seconds] = cost.prefill_s(np.array([2000.0]), NOTHING)
    assert 2000 / seconds / 4 == pytest.approx(52_300, rel=0.2)


def test_pairs_of_a_window_are_counted_one_by_one():
    group = AttentionGroup(1.0, 1, 1, window=3)
    pairs = [min(position, 3) for position in range(1, 8)]
    assert group.pairs(np.array([7.0]), np.array([0.0])) == sum(pairs)
    assert group.pairs(np.array([7.0]), np.array([2.0])) == sum(pairs[2:])
    assert AttentionGroup(1.0, 1, 1, None).pairs(np.array([7.0]), np.array([5.0])) == 6 + 7


def test_a_step_reads_the_experts_that_its_tokens_need():
    work = model_work(known.GPT_OSS_120B)
    dense = work.read_bytes(0)
    one = (work.read_bytes(1) - dense) / work.expert_bytes
    assert one == pytest.approx(4 / 128)
    assert (work.read_bytes(10_000) - dense) / work.expert_bytes == pytest.approx(1)


def test_prefill_is_bound_by_arithmetic_and_decoding_by_memory():
    cost = cost_of("LLAMA_3_1_8B", "h100", 1)

    def step_s(num_tokens: int, start: int) -> float:
        tokens = array("I", [1]) * num_tokens
        return cost.step_s(StepPlan((ScheduledSequence(SequenceId(0), tokens, start, ()),)))

    weights_s = cost.model.read_bytes(1) / (3.35e12 * 0.7)
    assert step_s(1, 1000) == pytest.approx(weights_s, rel=0.02)
    flops_s = 2 * cost.model.weights.per_token * 1024 / (989.4e12 * 0.5)
    assert step_s(1024, 0) == pytest.approx(flops_s, rel=0.03)


def test_only_routed_experts_reach_the_share_of_experts():
    """Attention, shared experts and the head are products as large as those of a dense model."""
    cost = cost_of("QWEN3_30B_A3B", "h100", 1)
    weights, [group] = cost.model.weights, cost.model.groups
    routed = weights.per_token - weights.dense
    pairs = group.pair_flops * 1000 * 1001 / 2
    dense_s = (2 * (weights.dense * 1000 + weights.head) + pairs) / (DENSE_SHARE * 989.4e12)
    experts_s = 2 * routed * 1000 / (MOE_SHARE * 989.4e12)

    [seconds] = cost.prefill_s(np.array([1000.0]), NOTHING)
    assert seconds == pytest.approx(dense_s + experts_s, rel=1e-6)
    alike = RooflineCost(cost.model, Machine(find_gpu("h100"), 1, compute_share=DENSE_SHARE))
    assert alike.prefill_s(np.array([1000.0]), NOTHING) < seconds


def test_weights_that_do_not_fit_are_refused_with_the_least_number_of_gpus():
    work = model_work(known.LLAMA_3_1_70B)
    with pytest.raises(ConfigError, match=r"131.4 GiB of weights do not fit.*: 2 are the least"):
        choose_machine(work, Machine(find_gpu("h100"), 1))
    assert choose_machine(work, Machine(find_gpu("h100"), 2)).num_gpus == 2
    # Two leave 11.9 GiB for KV, which is not enough to be chosen.
    assert choose_machine(work, Machine(find_gpu("h100"), 0)).num_gpus == 4
    assert choose_machine(work, Machine(find_gpu("mi300x"), 0)).num_gpus == 1


def test_kv_heads_are_kept_more_than_once_by_more_gpus_than_there_are():
    assert cost_of("LLAMA_3_1_70B", "h100", 8).kv_copies == 1
    assert cost_of("LLAMA_3_1_70B", "h100", 16).kv_copies == 2
    assert cost_of("DEEPSEEK_V3", "h100", 16).kv_copies == 1  # a latent is no head


@pytest.mark.parametrize(
    ("quantisation", "bits", "is_fp8"),
    [
        ({"quant_method": "fp8"}, 8, True),
        ({"quant_method": "gptq", "bits": 4}, 4.25, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 4.125, False),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, 4.75, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            4.25,
            False,
        ),
    ],
)
def test_quantised_weights_are_as_small_as_their_config_says(quantisation, bits, is_fp8):
    found = weight_format({**known.LLAMA_3_1_8B, "quantization_config": quantisation})
    assert (found.bits, found.is_fp8) == (bits, is_fp8)


def test_an_unknown_quantisation_is_refused_with_the_option_that_says_it():
    with pytest.raises(ConfigError, match=r"quant_method='hqq'.*--weights"):
        model_work({**known.LLAMA_3_1_8B, "quantization_config": {"quant_method": "hqq"}})


def test_the_figures_of_a_gpu_can_be_given():
    gpu = find_gpu("H100-SXM").overridden(500.0, 2.0, 64 * GIB)
    assert (gpu.flops, gpu.bandwidth, gpu.memory_bytes) == (500e12, 2e12, 64 * GIB)
    assert gpu.flops_fp8 == pytest.approx(1000e12, rel=0.01)
    with pytest.raises(ConfigError, match="gpu='h999': must be one of h100"):
        find_gpu("h999")
    with pytest.raises(ConfigError, match="compute_share=2"):
        Machine(gpu, 1, compute_share=2)

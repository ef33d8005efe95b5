"""Adapters say what ``peft`` says, whatever else is in the batch and in the cache."""

from pathlib import Path
from typing import Any

import pytest

from ostinato import LoRARequest, SamplingParams
from tests.exactness.reference import random_ids
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library
from tests.support.models.adapters import (
    INVOCATION,
    PeftReference,
    adapters,
    save_adapter,
    save_with_peft,
)
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.family_table import CHANGES

__all__ = ["adapters"]

NUM_NEW = 6
_BASE = random_ids(0, 21)
PROMPTS = [
    _BASE,
    _BASE[:13] + random_ids(1, 17),
    random_ids(2, 9),
    _BASE[:10] + INVOCATION + random_ids(3, 8),
    _BASE[:10] + INVOCATION + random_ids(3, 5) + INVOCATION + random_ids(4, 2),
]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def reference(checkpoints: Checkpoints, adapters: Path) -> PeftReference:
    folders = [adapters / name for name in ("sql", "fr", "judge")]
    return PeftReference(checkpoints.path("llama"), folders)


def requests(folder: Path) -> list[LoRARequest | None]:
    names = enumerate(("sql", "fr", "judge"), 1)
    return [*(LoRARequest(name, number, folder / name) for number, name in names), None, None]


@pytest.mark.parametrize(
    "settings",
    [
        {"index": "radix"},
        {"index": "hash"},
        pytest.param({"dtype": "float32", "block_size": 16}, marks=needs_library),
    ],
    ids=str,
)
def test_batches_of_adapters_and_none_agree_with_peft(
    make_llm: MakeLLM, adapters: Path, reference: PeftReference, settings: dict[str, object]
):
    """Each prompt meets each adapter: cold in chunks of twelve, with hits, and as a fork.

    The hash index takes two turns of the five, since rows are computed alike with both.
    """
    llm = make_llm(
        "llama",
        enable_lora=True,
        max_num_seqs=12,
        max_num_batched_tokens=12,
        num_blocks=128,
        **settings,
    )
    each = requests(adapters)
    for turn in range(2 if settings.get("index") == "hash" else len(each)):
        turned = each[turn:] + each[:turn]
        outputs = llm.generate(PROMPTS, GREEDY, lora_request=turned, use_tqdm=False)
        for output, prompt, request in zip(outputs, PROMPTS, turned, strict=True):
            name = "" if request is None else request.lora_name
            wanted = reference.generated(prompt, name, NUM_NEW)
            assert list(output.outputs[0].token_ids) == wanted, (turn, name)
    forks = SamplingParams(
        n=3, max_tokens=NUM_NEW, temperature=0, ignore_eos=True, detokenize=False
    )
    (output,) = llm.generate(PROMPTS[:1], forks, lora_request=each[0], use_tqdm=False)
    assert output.num_cached_tokens > 16
    for fork in output.outputs:
        assert list(fork.token_ids) == reference.generated(PROMPTS[0], "sql", NUM_NEW)


def test_an_adapter_that_peft_saved_is_the_same_content(
    make_llm: MakeLLM, adapters: Path, reference: PeftReference, tmp_path: Path
):
    reference.save(tmp_path)
    llm = make_llm("llama", enable_lora=True, num_blocks=8)
    for number, name in enumerate(("sql", "fr", "judge"), 1):
        llm.add_lora(LoRARequest(f"ours {name}", number, adapters / name))
        llm.add_lora(LoRARequest(f"theirs {name}", 10 + number, tmp_path / name))
    assert len(llm.engine.runner.adapters) == 3


FAMILIES: dict[str, list[str]] = {
    "qwen3_moe": ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"],
    "mixtral": ["o_proj", "w1", "w2", "w3", "gate"],
    "qwen2_moe": ["shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"],
    "gpt2": ["c_attn", "c_fc"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w2"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_b_proj"],
    "qwen3_next": ["q_proj", "in_proj_qkvz", "out_proj"],
    "falcon_h1": ["in_proj", "q_proj", "down_proj"],
}
"""Linear layers by family: beside experts, joined ones, of transposed weights, before states."""

_NIGHTLY = ("phi3", "deepseek_v3", "qwen3_next", "falcon_h1")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in _NIGHTLY else name
        for name in FAMILIES
    ],
)
def test_adapters_of_other_families_agree_with_peft(
    make_llm: MakeLLM, checkpoints: Checkpoints, tmp_path: Path, family: str
):
    """A prompt with an adapter, the same with another one and with none, in one batch, twice."""
    base, folders = checkpoints.path(family), [tmp_path / name for name in ("sql", "fr")]
    for seed, folder in enumerate(folders):
        config = {"target_modules": FAMILIES[family], "fan_in_fan_out": family == "gpt2"}
        save_adapter(base, folder, seed, **config)
    llm = make_llm(
        family, enable_lora=True, max_num_seqs=4, max_num_batched_tokens=80, num_blocks=128
    )
    reference = PeftReference(base, folders)
    prompt, names = random_ids(0, 90), ["sql", "", "fr"]
    made = [LoRARequest(it.name, number, it) for number, it in enumerate(folders, 1)]
    for _ in range(2):
        each = [made[0], None, made[1]]
        outputs = llm.generate([prompt] * 3, GREEDY, lora_request=each, use_tqdm=False)
        said = [list(output.outputs[0].token_ids) for output in outputs]
        assert said == [reference.generated(prompt, name, NUM_NEW) for name in names]


_MORE = (
    "minimax_m2",
    "glm4_moe",
    "dots1",
    "ernie4_5_moe",
    "granitemoeshared",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_moe_text",
    "phimoe",
    "cohere2_moe",
    "hy_v3",
    "laguna",
    "lfm2_moe",
)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
STACKED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"target_parameters": [*EXPERTS, "mlp.gate.weight", "q_proj.weight"]},
    "mixtral": {"target_parameters": [EXPERTS[1]], "target_modules": ["q_proj"]},
    "olmoe": {"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 5}},
    "gpt_oss": {"target_parameters": [*EXPERTS, "router.weight"], "use_rslora": True},
    "granitemoe": {"target_parameters": [*EXPERTS, "router.weight"]},
    "qwen2_moe": {
        "target_parameters": EXPERTS,
        "target_modules": ["shared_expert.gate_proj", "shared_expert_gate"],
    },
    "nemotron_h": {"target_parameters": ["experts.up_proj", EXPERTS[1], "gate.weight"]},
    "deepseek_v3": {"target_parameters": [*EXPERTS, "1.mlp.gate.weight"]},
    "hunyuan_v1_moe": {"target_parameters": EXPERTS, "target_modules": ["wg"]},
    "afmoe": {"target_parameters": EXPERTS, "target_modules": ["router.gate"]},
    **{key: {"target_parameters": [*EXPERTS, "gate.weight", "router.weight"]} for key in _MORE},
}
"""What ``peft`` saves of stacked experts and routers."""


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float64"},
        pytest.param({"dtype": "float32"}, marks=needs_library),
        pytest.param({"dtype": "float32", "forward": "packed"}, marks=needs_library),
        pytest.param({"dtype": "float32", "forward": "plain"}, marks=needs_library),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.nightly) if name in _MORE else name for name in STACKED],
)
def test_adapters_of_stacked_experts_agree_with_the_peft_that_saved_them(
    make_llm: MakeLLM,
    checkpoints: Checkpoints,
    tmp_path: Path,
    family: str,
    settings: dict[str, str],
):
    """Two adapters and none in one batch, cold and with hits: called modules, and fused ones."""
    changes = CHANGES.get(family, {})
    base, folders = checkpoints.path(family, **changes), [tmp_path / name for name in ("sql", "fr")]
    for seed, folder in enumerate(folders):
        save_with_peft(base, folder, seed, **STACKED[family])
    reference, prompt = PeftReference(base, folders), random_ids(0, 40)
    expected = [reference.generated(prompt, name, NUM_NEW) for name in ("sql", "", "fr")]
    llm = make_llm(
        family, config=changes, enable_lora=True, num_blocks=64, block_size=16, **settings
    )
    sql, fr = (LoRARequest(it.name, number, it) for number, it in enumerate(folders, 1))
    for _ in range(2):
        outputs = llm.generate([prompt] * 3, GREEDY, lora_request=[sql, None, fr], use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert expected[0] != expected[1] != expected[2]

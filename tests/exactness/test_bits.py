"""Law 7, to the bit: the logits of a token hang on its prefix alone.

Each prompt runs alone, without a cache; then all run together, twice, through an engine whose
settings are drawn: chunks, strangers, hits at any token, sharing groups, forks, preemption, both
indexes, three block sizes, threads, and reading once. Some have an adapter. Every row of logits
must be one that was computed alone, and so must every token be, greedy or drawn with a seed.
"""

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LLM, LoRARequest, RequestOutput, SamplingParams
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.native.library import Isa
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import ISAS, isa_in_use, needs_library, threads_in_use
from tests.support.models.adapters import INVOCATION, save_adapter
from tests.support.models.model_families import MAX_LENGTH, VOCAB_SIZE, WINDOW

pytestmark = [needs_library, pytest.mark.one_case_in(2)]

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "int4-float32": {"dtype": "float32", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 5 * WINDOW},
    "gemma2": {"head_dim": 32, "sliding_window": 5 * WINDOW},
    "cohere": {"head_dim": 32},
    "olmo2": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},
}
BY_DAY = [
    ("qwen3", "bfloat16"),
    ("mistral", "float32"),
    ("mistral", "int8"),
    ("qwen3", "int4"),
    ("qwen3", "int8-kv"),
    ("gemma2", "bfloat16"),
    ("cohere", "int4"),
    ("olmo2", "float32"),
    ("qwen3_moe", "bfloat16"),
    ("gpt_oss", "int4"),
]
NUM_NEW = 4


class Witness:
    """An engine, and every row of logits that it has computed."""

    def __init__(self, llm: LLM, section_keys: int = 64) -> None:
        runner = llm.engine.runner
        assert isinstance(runner.attention, NativeAttention)
        # Sections so short that these prompts have several, and parts that threads share.
        limits = runner.attention.limits
        runner.attention.limits = replace(limits, section_keys=section_keys, min_part=32.0)
        self.llm, self.rows = llm, set[bytes]()
        self._forward, runner.forward = runner.forward, self._recorded

    def _recorded(
        self, inputs: Any, adapters: Any = None, images: Any = None, hidden: Any = None
    ) -> Tensor:
        logits = self._forward(inputs, adapters, images, hidden)
        width = logits.element_size()
        self.rows.update(
            row.tobytes() for row in logits.view(torch.int16 if width == 2 else torch.int32).numpy()
        )
        return logits

    def answers(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        adapters: list[LoRARequest | None] | None = None,
    ) -> list[Any]:
        self.outputs: list[RequestOutput] = self.llm.generate(
            prompts, params, lora_request=adapters, use_tqdm=False
        )
        return [[c.token_ids for c in output.outputs] for output in self.outputs]


def draw_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Relatives of a few texts that part anywhere, and strangers."""

    def ids(most: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, most))]

    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(200)] for _ in range(3)]
    return [
        rng.choice(texts)[: rng.choice([0, rng.randrange(200), 16 * rng.randint(1, 12)])]
        + rng.choice([[], INVOCATION])
        + ids(30)
        for _ in range(count)
    ]


def draw_adapters(rng: random.Random, base: Path, folder: Path, count: int) -> list[Any]:
    """An adapter for every other prompt: of whole sequences, or an activated one."""
    configs: list[dict[str, Any]] = [{"r": 5}, {"alora_invocation_tokens": INVOCATION}]
    made = [
        LoRARequest(f"{number}", number, save_adapter(base, folder / f"{number}", number, **config))
        for number, config in enumerate(configs, 1)
    ]
    return [rng.choice([None, None, *made]) for _ in range(count)]


def draw_params(rng: random.Random) -> SamplingParams:
    seeded = rng.random() < 0.4
    return SamplingParams(
        temperature=0.9 if seeded else 0.0,
        seed=rng.randrange(99) if seeded else None,
        top_p=rng.choice([1.0, 0.9]) if seeded else 1.0,
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randint(1, NUM_NEW),
        ignore_eos=True,
        detokenize=False,
    )


def draw_settings(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([16, 16, 64])
    most = rng.choice([2, 3, 6])  # sequences that fit the pool at once
    return {
        "block_size": block_size,
        "index": rng.choice(["radix", "hash"]),
        "read_once": rng.choice(["always", "always", "auto", "never"]),
        "num_blocks": most * (MAX_LENGTH // block_size) + 2,
        "max_num_seqs": rng.choice([4, 16]),
        "max_num_batched_tokens": rng.choice([17, 40, 100, 2048]),
    }


def compare(make_llm: MakeLLM, model: str, numbers: str, rng: random.Random, count: int) -> int:
    """Run some prompts alone, and then together; returns how many of their tokens hit."""
    common = {"config": MODELS[model], "enable_lora": True, **FORMATS[numbers]}
    prompts = draw_prompts(rng, count)
    params = [draw_params(rng) for _ in prompts]
    alone = Witness(
        make_llm(model, enable_prefix_caching=False, max_num_seqs=2, block_size=16, **common)
    )
    together = Witness(make_llm(model, **draw_settings(rng), **common))
    cached = 0
    with tempfile.TemporaryDirectory() as folder, threads_in_use(rng.choice([1, 2])):
        adapters = draw_adapters(rng, Path(alone.llm.engine.config.model), Path(folder), count)
        each = zip(prompts, params, adapters, strict=True)
        expected = [alone.answers([p], [q], [a])[0] for p, q, a in each]
        for _ in range(2):
            assert together.answers(prompts, params, adapters) == expected
            cached += sum(output.num_cached_tokens for output in together.outputs)
    assert together.rows <= alone.rows
    return cached


@pytest.mark.parametrize(("model", "numbers"), BY_DAY)
def test_together_prompts_have_the_bits_that_they_have_alone(
    isa: Isa, model: str, numbers: str, make_llm: MakeLLM
):
    assert compare(make_llm, model, numbers, random.Random(f"{isa} {model} {numbers}"), 12) > 0


def test_sums_that_are_cut_elsewhere_have_other_bits(make_llm: MakeLLM):
    """So that the test above is known to be able to fail."""
    prompt, params = [list(range(3, 150))], [SamplingParams(temperature=0.0, max_tokens=1)]
    engines = [
        Witness(make_llm("qwen3", block_size=16, config=MODELS["qwen3"], dtype="float32"), keys)
        for keys in (64, 32)
    ]

    for engine in engines:
        engine.answers(prompt, params)

    assert not engines[0].rows & engines[1].rows


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("model", MODELS)
def test_ten_thousand_prompts_have_the_bits_that_they_have_alone(model, seed, make_llm: MakeLLM):
    """Five models, 25 draws of 200 prompts or more, over all formats and instruction sets."""
    cached = 0
    for isa in ISAS:
        for numbers in FORMATS:
            with isa_in_use(isa):
                rng = random.Random(f"{isa} {model} {numbers} {seed}")
                count = 200 // len(ISAS) // len(FORMATS) + 1
                cached += compare(make_llm, model, numbers, rng, count)
    assert cached > 0

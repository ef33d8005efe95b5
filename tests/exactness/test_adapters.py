"""Adapters say what ``peft`` says, whatever else is in the batch and in the cache."""

from pathlib import Path

import pytest

from ostinato import LoRARequest, SamplingParams
from tests.exactness.reference import random_ids
from tests.support.adapters import INVOCATION, PeftReference, adapters
from tests.support.checkpoints import Checkpoints
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library

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
    """Each prompt meets each adapter: cold in chunks of twelve, with hits, and as a fork."""
    llm = make_llm(
        "llama",
        enable_lora=True,
        max_num_seqs=12,
        max_num_batched_tokens=12,
        num_blocks=128,
        **settings,
    )
    each = requests(adapters)
    for turn in range(len(each)):
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

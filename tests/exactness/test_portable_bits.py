"""The same logits and tokens on every processor, to the bit.

``portable_bits.json`` was written on x86-64 with AVX2, and every instruction set of every machine
must give what it says: tiny models whose weights are made of whole numbers, with weights of 8 and
4 bits and keys and values of 8 bits, in chunks, with hits, greedy and drawn with a seed::

    python -m tests.exactness.test_portable_bits      writes the file anew
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError
from ostinato.runner import portable_bits
from ostinato.runner.native.library import Isa
from tests.support.instruction_sets import needs_library
from tests.support.models.portable_weights import portable_numbers, save_portable_checkpoint

pytestmark = needs_library

GOLDEN = Path(__file__).with_name("portable_bits.json")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32}, {"dtype": "float32", "quantization": "int8"}),
    "llama": ("llama", {}, {"dtype": "bfloat16", "quantization": "w8a8"}),
    "gemma3_text": ("gemma3_text", {}, {"dtype": "bfloat16", "quantization": "int4"}),
    "olmo2": ("olmo2", {"head_dim": 32}, {"dtype": "float32", "quantization": "w4a8"}),
}
"""Model type, changes of its config, and settings."""


def prompts() -> list[list[int]]:
    ids = (portable_numbers(99, (70,)).abs() * 300).int().clamp(3, 319).tolist()
    return [ids, ids[:40] + ids[50:60], ids[20:33]]


def open_llm(path: Path, **settings: Any) -> LLM:
    given = {"kv_cache_dtype": "int8", "portable_bits": True, "block_size": 16, "num_blocks": 40}
    limits = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "weight_cache_bytes": 0}
    return LLM(str(path), **{**given, **limits, **settings})


def answers_of(llm: LLM) -> dict[str, Any]:
    """Return tokens, and a digest of all rows of logits, in whatever order steps computed them."""
    rows, forward = set[bytes](), llm.engine.runner.forward

    def recorded(*arguments: Any, **keywords: Any) -> torch.Tensor:
        logits = forward(*arguments, **keywords)
        width = torch.int16 if logits.element_size() == 2 else torch.int32
        rows.update(row.tobytes() for row in logits.contiguous().view(width).numpy())
        return logits

    llm.engine.runner.forward = recorded
    tokens = []
    for temperature in (0.0, 0.9):
        params = SamplingParams(
            temperature=temperature, seed=7, max_tokens=6, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        tokens += [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "logits": hashlib.sha256(b"".join(sorted(rows))).hexdigest()}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, changes, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp("portable")
    return request.param, save_portable_checkpoint(folder, family, **changes), settings


@pytest.mark.one_case_in(2)
def test_logits_and_tokens_are_those_of_every_processor(checkpoint: Any, isa: Isa):
    name, path, settings = checkpoint

    llm = open_llm(path, **settings)

    assert answers_of(llm) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_dtype": "auto"}, "set kv_cache_dtype='int8'"),
        ({"quantization": None}, "weights are no codes: set quantization"),
        ({"attention": "torch"}, "attention is computed by torch"),
        ({"forward": "packed"}, "not all of the model is fused"),
    ],
)
def test_what_differs_between_processors_is_refused(
    settings: dict[str, Any], reason: str, tmp_path: Path
):
    path = save_portable_checkpoint(tmp_path, "llama")

    with pytest.raises(ConfigError, match=f"portable_bits=True: .*{reason}.*portable_bits=False"):
        open_llm(path, **{"dtype": "float32", "quantization": "int8", **settings})


def test_a_cap_of_logits_is_refused(tmp_path: Path):
    path = save_portable_checkpoint(tmp_path, "gemma2")

    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        open_llm(path, dtype="float32", quantization="int8")


@pytest.mark.parametrize(
    ("best", "used"), [(Isa.AMX, Isa.AVX512_BF16), (Isa.NEON_BF16, Isa.NEON_I8MM)]
)
def test_what_rounds_in_a_way_of_its_own_is_left_unused(
    best: Isa, used: Isa, monkeypatch: pytest.MonkeyPatch
):
    """AMX multiplies codes in bfloat16, and so BFMMLA plain weights; the next set does not."""
    taken: list[Isa] = []
    monkeypatch.setattr(portable_bits, "current_isa", lambda native: best)
    monkeypatch.setattr(portable_bits, "use_isa", lambda native, isa: taken.append(isa))

    portable_bits.use_portable_kernels()

    assert taken == [used]


def write_golden() -> None:
    import tempfile

    golden = {}
    for name, (family, changes, settings) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = save_portable_checkpoint(Path(folder), family, **changes)
            golden[name] = answers_of(open_llm(path, **settings))
    lines = [f"{json.dumps(name)}: {json.dumps(answers)}" for name, answers in golden.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_golden()

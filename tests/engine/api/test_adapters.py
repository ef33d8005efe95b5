"""Adapters come and go while requests run, and are told apart by their content."""

import gc
import json
import os
import shutil
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM, LoRARequest, MissReason, RequestOutput, SamplingParams, StructuredOutputs
from ostinato.core.errors import ConfigError, RequestError
from ostinato.engine.api.adapter_api import remove_adapter
from ostinato.engine.loop.adapters import Adapters
from ostinato.engine.loop.kv_events_wire import BatchEncoder, BlockStored, decode
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.lab.size.weights import adapter_bytes
from ostinato.runner.checkpoints.model_resolver import resolve_model
from tests.engine.tiers.tiered import slow_computing
from tests.support.engines import assert_idle
from tests.support.instruction_sets import needs_library
from tests.support.models.adapters import INVOCATION, adapters, save_adapter, save_with_peft
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.models.images import image_checkpoint

__all__ = ["adapters", "checkpoints"]

ONE = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
PROMPT = list(range(20, 41))  # five blocks of four, and one token


@pytest.fixture(scope="module")
def shared(checkpoints: Checkpoints) -> LLM:
    path = str(checkpoints.path("llama"))
    return LLM(
        path, dtype="float64", block_size=4, num_blocks=256, enable_lora=True, max_loras=12,
        max_lora_rank=8, max_lora_bytes=2**20, keep_event_batches=10_000,
    )  # fmt: skip


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Lend an engine with a cold cache and no adapter."""
    shared.reset_prefix_cache()
    yield shared
    for number in shared.list_loras():
        assert shared.remove_lora(number)
    assert not shared.engine.runner.adapters, "weights of an adapter were kept"
    assert_idle(shared.engine)


def hit(llm: LLM, prompt: list[int], request: LoRARequest | None = None) -> int:
    """Serve a prompt; returns how many tokens hit."""
    (output,) = llm.generate(prompt, ONE, lora_request=request, use_tqdm=False)
    return output.num_cached_tokens


def rewritten(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy an adapter with other entries in its config; ``weights`` scales its weights."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    factor = changes.pop("weights", None)
    config = json.loads((folder / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | changes))
    if factor is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        scaled = {name: tensor * factor for name, tensor in tensors.items()}
        save_file(scaled, target / "adapter_model.safetensors")
    return target


def test_an_adapter_shares_with_its_own_content_alone(llm: LLM, adapters: Path, tmp_path: Path):
    """Base, adapter, the same content under another name, other content under the old name."""
    sql = LoRARequest("sql", 1, adapters / "sql")
    assert (hit(llm, PROMPT), hit(llm, PROMPT)) == (0, 20)
    assert (hit(llm, PROMPT, sql), hit(llm, PROMPT, sql)) == (0, 20)
    twin = rewritten(adapters / "sql", tmp_path / "twin")
    assert hit(llm, PROMPT, LoRARequest("twin", 2, twin)) == 20
    assert len(llm.engine.runner.adapters) == 1, "one content is in memory once"
    rewritten(adapters / "sql", twin, weights=0.5)
    assert hit(llm, PROMPT, LoRARequest("twin", 2, twin)) == 0, "new content, old name and path"
    assert hit(llm, PROMPT, sql) == 20
    assert llm.remove_lora("sql") and hit(llm, PROMPT, sql) == 20, "loaded again, by its content"


def test_ten_specialists_compute_their_context_once(llm: LLM, adapters: Path, tmp_path: Path):
    """Activated adapters share everything before their invocation with the base model."""
    context = list(range(20, 70))
    for number in range(1, 11):
        folder = rewritten(adapters / "judge", tmp_path / str(number), weights=number / 8)
        request = LoRARequest(f"judge-{number}", number, folder)
        found = hit(llm, [*context, *INVOCATION, 11, 12], request)
        assert found == (50 if number > 1 else 0)
        assert hit(llm, [*context, *INVOCATION, 11, 12], request) == 54
    assert hit(llm, context) == 49, "the base model's own"
    assert hit(llm, context[:9], request) == 8, "without the invocation it is the base model"


def test_an_activated_adapter_starts_at_the_last_invocation(llm: LLM, adapters: Path):
    llm.add_lora(LoRARequest("judge", 1, adapters / "judge"))
    prompt = parse_prompt({"prompt_token_ids": [1], "adapter": "judge"})
    tokens = array("I", [*INVOCATION, 20, 21, *INVOCATION, 7, 8])
    assert llm.engine.identities.of_prompt(prompt, tokens).adapter_start == 5
    assert llm.engine.identities.of_prompt(prompt, tokens[-2:]).adapter == b""


def test_an_adapter_reads_the_public_prefix_that_ends_before_it(llm: LLM, adapters: Path):
    """It is the base model's: an adapter that computes from the first token on reads none."""
    llm.publish("short", PROMPT[:8])
    llm.publish("long", PROMPT[:16])
    sql, judge = (LoRARequest(x, i, adapters / x) for i, x in enumerate(("sql", "judge"), 1))

    def hits(tokens: list[int], request: LoRARequest) -> list[int]:
        asked = {"prompt_token_ids": tokens, "cache_salt": "ann", "public_prefixes": ["*"]}
        (output,) = llm.generate(asked, ONE, lora_request=request, use_tqdm=False)
        (again,) = llm.generate(asked, ONE, lora_request=request, use_tqdm=False)
        return [output.num_cached_tokens, again.num_cached_tokens]

    assert hits(PROMPT, sql) == [0, 20]
    assert hits([*PROMPT[:16], *INVOCATION, 7, 8, 9], judge) == [16, 21]
    adapted = [*PROMPT[:8], *INVOCATION, *range(70, 81)]
    assert hits(adapted, judge) == [8, 21], "the longest that does"
    for name in ("short", "long"):
        llm.unpublish(name)


def test_in_a_chat_the_turns_before_the_last_invocation_are_the_base_model_s(
    llm: LLM, adapters: Path
):
    """Each turn has an invocation: what the adapter computed is not the next turn's prefix."""
    judge = LoRARequest("judge", 1, adapters / "judge")
    context, question = list(range(20, 60)), [*INVOCATION, 11, 12, 13, 14, 15]
    first = [*context, *question]
    second = [*first, 90, *question]
    assert (hit(llm, first, judge), hit(llm, first, judge)) == (0, 47)
    assert (hit(llm, second, judge), hit(llm, second, judge)) == (40, 56)
    assert hit(llm, [*first, 90]) == 48, "computed by the base model in the second turn"


def test_requests_of_an_unloaded_adapter_finish_and_publish_nothing_more(llm: LLM, adapters: Path):
    """One runs and one waits when it is unloaded; afterwards none of their new blocks are found."""
    engine, sql = llm.engine, LoRARequest("sql", 1, adapters / "sql")
    llm.add_lora(sql)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, detokenize=False)
    prompt = parse_prompt({"prompt_token_ids": PROMPT, "adapter": "sql"})
    other = parse_prompt({"prompt_token_ids": PROMPT[::-1], "adapter": "sql"})
    made = [engine.make_request(one, params, name) for one, name in ((prompt, "a"), (other, "b"))]
    late = engine.make_request(prompt, params, "late")
    engine.add(made[0])
    engine.step()
    engine.add(made[1])
    [adapter] = engine.runner.adapters.values()
    weights = weakref.ref(adapter)
    del adapter
    assert remove_adapter(engine, "sql")
    with pytest.raises(RequestError, match="was unloaded"):
        engine.add(late)
    with pytest.raises(RequestError, match="'sql' is not loaded"):
        engine.make_request(prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs.update({s.request.request_id: s.output() for s in engine.step() if s.finished})
    assert [len(outputs[name].outputs[0].token_ids) for name in "ab"] == [9, 9]
    assert not engine.runner.adapters, "its weights went with its last request"
    gc.collect()
    assert weights() is None, "they are nowhere else"
    whole = [*PROMPT, *outputs["a"].outputs[0].token_ids, 5]
    assert hit(llm, whole, sql) == 20, "what it had published before"
    assert hit(llm, PROMPT[::-1], sql) == 0


def test_explanations_name_the_adapters(llm: LLM, adapters: Path):
    """The context of an activated adapter counts as the base model's."""
    sql = LoRARequest("sql", 1, adapters / "sql")
    prompt = [number + 100 for number in PROMPT]
    hit(llm, prompt)
    (output,) = llm.generate(prompt, ONE, lora_request=sql, use_tqdm=False)
    span = llm.explain(output).spans[0]
    assert span.reason is MissReason.OTHER_ADAPTER
    assert "computed by the base model, and this request asks for adapter 'sql'" in span.sentence

    long = [*prompt, *INVOCATION, 11, 12]
    hit(llm, long)
    judge = LoRARequest("judge", 2, adapters / "judge")
    (output,) = llm.generate(long, ONE, lora_request=judge, use_tqdm=False)
    spans = llm.explain(output).spans
    assert [(span.start, span.stop, span.reason) for span in spans][-2:] == [
        (21, 25, MissReason.OTHER_ADAPTER),
        (25, 26, MissReason.LAST_TOKEN),
    ]


def test_events_name_the_adapter_from_its_first_block_on(llm: LLM, adapters: Path):
    """Vllm's ``lora_name`` is the digest, and the boundary is among the block's extra keys."""
    log = llm.engine.cache.events
    assert log is not None
    before = log.next_sequence
    judge = LoRARequest("judge", 1, adapters / "judge")
    hit(llm, [*PROMPT, *INVOCATION, 11, 12, 13, 14], judge)
    stored = [
        event
        for batch in log.replay(before) or ()
        for event in decode(BatchEncoder("CPU").encode(batch)).events
        if isinstance(event, BlockStored)
    ]
    digest = llm.engine.adapters.of("judge").digest.hex()
    names = [(event.lora_name, len(event.block_hashes)) for event in stored]
    assert names == [(None, 5), (digest, 2)]
    assert stored[0].extra_keys is None
    assert stored[1].extra_keys is not None and stored[1].extra_keys[0] is not None


def test_a_disk_keeps_adapters_apart_over_a_restart(tmp_path: Path):
    """What the base model and one adapter computed is found by them alone."""
    base, tokens = resolve_model("tiny-shakespeare"), [1 + i * 37 % 61 for i in range(70)]
    for seed, name in enumerate(("sql", "fr")):
        save_adapter(base, tmp_path / name, seed, target_modules=["q_proj", "down_proj"])
    sql, fr = (LoRARequest(name, n, tmp_path / name) for n, name in enumerate(("sql", "fr"), 1))
    settings = {"num_blocks": 64, "kv_disk": tmp_path / "kv", "kv_disk_bytes": 2**26}
    with LLM(enable_lora=True, **settings) as llm:
        before = llm.generate([tokens] * 2, ONE, lora_request=[sql, None], use_tqdm=False)
    after = []
    with LLM(enable_lora=True, **settings) as llm:
        for request in (fr, sql, None):
            llm.engine.tiers.loads.prices = slow_computing()  # no load is too slow
            after += llm.generate(tokens, ONE, lora_request=request, use_tqdm=False)
    assert [it.cached_tokens_from for it in after] == [{}, {"disk": 64}, {"disk": 64}]
    assert [it.outputs[0].token_ids for it in after[1:]] == [
        it.outputs[0].token_ids for it in before
    ]


@needs_library
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_of_a_quantized_model_answer_alike_alone_and_in_any_batch(
    tmp_path: Path, quantization: str
):
    """Weights and keys of few bits, one request bound to a choice; then with hits, one by one."""
    base = resolve_model("tiny-shakespeare")
    sql = LoRARequest("sql", 1, save_adapter(base, tmp_path / "sql", 1))
    some = SamplingParams(max_tokens=8, temperature=0)
    bound = StructuredOutputs(choice=["Aye", "No"])
    choice = SamplingParams(max_tokens=8, temperature=0, structured_outputs=bound)
    prompts = ["ROMEO: What light through"] * 3
    params, adapters = [some, some, choice], [sql, None, sql]
    with LLM(
        quantization=quantization, kv_cache_dtype="int8", enable_lora=True, num_blocks=64
    ) as llm:
        together = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        said = [output.outputs[0].text for output in together]
        assert said[0] != said[1] and said[2] in ("Aye", "No")
        for prompt, one, adapter, text in zip(prompts, params, adapters, said, strict=True):
            [alone] = llm.generate(prompt, one, lora_request=adapter, use_tqdm=False)
            assert alone.num_cached_tokens > 0 and alone.outputs[0].text == text


REFUSED = [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias='all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"peft_type": "PREFIX_TUNING"}, "only LORA is served"),
    ({"init_lora_weights": "pissa"}, "changes the base"),
    ({"target_parameters": {"experts": 1}}, "must be a list of names"),
    ({"alora_invocation_tokens": [10**6]}, "alora_invocation_tokens"),
    ({"kasa_config": {"beta": 1}}, "KaSA"),
    ({"lora_alpha": "eight"}, "lora_alpha='eight'"),
    ({"r": 10**400}, "r=1000"),
    ({"r": 8}, "rank 4, and its config says 8"),
    ({"alpha_pattern": {"(a+)+$": 1}}, "at most four repetitions"),
    ({"rank_pattern": {"(": 4}}, "at most four repetitions"),
    ({"weights": float("nan")}, "not finite"),
    ({"weights": torch.ones(2, 1, 1)}, "another base model"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda it: str(it)[:60])
def test_what_cannot_be_served_is_refused_by_name(
    llm: LLM, adapters: Path, tmp_path: Path, changes: dict[str, Any], message: str
):
    folder = rewritten(adapters / "sql", tmp_path / "bad", **changes)
    with pytest.raises(RequestError, match=message):
        llm.add_lora(LoRARequest("bad", 1, folder))
    assert not llm.list_loras() and not llm.engine.runner.adapters


def test_broken_files_are_refused(llm: LLM, adapters: Path, tmp_path: Path):
    folder = rewritten(adapters / "sql", tmp_path / "bad")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(RequestError, match="no readable adapter_model"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    weights.write_bytes((2**40).to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(RequestError, match="its head would take 1099511627776 bytes"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    weights.unlink()
    with pytest.raises(RequestError, match="cannot be read"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    os.mkfifo(weights)
    with pytest.raises(RequestError, match="is no file"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    weights.unlink()
    config = folder / "adapter_config.json"
    plain = config.read_bytes()
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)}, weights)
    config.write_text("[" * 100_000)
    with pytest.raises(RequestError, match="no readable adapter_config"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    config.write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"] * 2_000_000}))
    with pytest.raises(RequestError, match="never above 1048576 bytes"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    config.write_bytes(plain)
    with pytest.raises(RequestError, match="lora_embedding_A"):
        llm.add_lora(LoRARequest("bad", 1, folder))
    for name in ("lm_head", "model.layers.9.mlp.up_proj", "model.layers.0.mlp.experts.1.up_proj"):
        save_file({f"base_model.model.{name}.lora_A.weight": torch.ones(2, 2)}, weights)
        with pytest.raises(RequestError, match=name):
            llm.add_lora(LoRARequest("bad", 1, folder))


def test_updates_that_no_expert_has_are_refused(checkpoints: Checkpoints, tmp_path: Path):
    """Four experts of 48 by 32; the weights of those that fit share tiles, and are counted once."""
    base, folder = checkpoints.path("qwen3_moe"), tmp_path / "sql"
    save_adapter(base, folder, 1, target_modules=["gate_proj"])
    path = "base_model.model.model.layers.0.mlp.experts"
    refused: list[tuple[dict[str, tuple[tuple[int, int], tuple[int, int]]], str]] = [
        ({"9.gate_proj": ((4, 48), (32, 4))}, "experts here are 0 to 3, each with gate_proj"),
        ({"1.w9": ((4, 48), (32, 4))}, "experts here are 0 to 3"),
        ({"1.up_proj": ((4, 32), (48, 4))}, "has 48 inputs and 32 outputs"),
        ({"": ((6, 48), (64, 6))}, "each of the 4 experts here has gate_up_proj of 48 inputs"),
        ({"": ((16, 65), (48, 16))}, "down_proj of 32 inputs and 48 outputs"),
        ({"": ((8, 32), (48, 8))}, "experts.down_proj have rank 2, and its config says 4"),
        ({"": ((16, 32), (48, 16)), "base_layer": ((16, 32), (48, 16))}, "twice"),
    ]
    with LLM(str(base), dtype="float32", num_blocks=8, block_size=16, enable_lora=True) as llm:
        llm.add_lora(LoRARequest("sql", 1, folder))
        (adapter,) = llm.engine.runner.adapters.values()
        assert adapter.num_bytes == 2 * 4 * (32 * 64 + 32 * 32)
        assert adapter.num_bytes == 2 * adapter_bytes([str(folder)], packed=True)
        for shapes, message in refused:
            tensors = {
                ".".join(filter(None, (path, name, f"lora_{part}.weight"))): torch.ones(*shape)
                for name, both in shapes.items()
                for part, shape in zip("AB", both, strict=True)
            }
            save_file(tensors, folder / "adapter_model.safetensors")
            with pytest.raises(RequestError, match=message):
                llm.add_lora(LoRARequest("bad", 2, folder))
        assert list(llm.engine.runner.adapters.values()) == [adapter]


def test_stacked_experts_of_an_older_peft_are_the_same_content(
    checkpoints: Checkpoints, tmp_path: Path
):
    """Before 0.19 it had inputs and outputs the other way around; gates and ups fit both ways."""
    base, count = checkpoints.path("qwen3_moe", moe_intermediate_size=24), 4
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    new = save_with_peft(base, tmp_path / "new", 1, target_parameters=targets)
    old = rewritten(new, tmp_path / "old", peft_version="0.18.1", weights=1)
    turned = load_file(old / "adapter_model.safetensors")
    for name in [name for name in turned if "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        down, up = turned[name], turned[other]
        a = up.view(len(up), -1, count).permute(2, 1, 0).reshape(-1, len(up))
        b = down.view(count, -1, down.shape[1]).permute(2, 1, 0).reshape(down.shape[1], -1)
        turned |= {name: a.contiguous(), other: b.contiguous()}
    save_file(turned, old / "adapter_model.safetensors")
    with LLM(str(base), dtype="float32", num_blocks=8, block_size=16, enable_lora=True) as llm:
        for number, folder in enumerate((new, old), 1):
            llm.add_lora(LoRARequest(folder.name, number, folder))
        assert len(llm.engine.runner.adapters) == 1


def test_an_image_encoder_has_no_adapters(checkpoints: Checkpoints, adapters: Path, tmp_path: Path):
    """What it makes of an image is kept by the image alone."""
    folder = rewritten(adapters / "sql", tmp_path / "bad")
    name = "model.vision_tower.encoder.layers.0.self_attn.q_proj"
    tensors = {f"base_model.model.{name}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    base = image_checkpoint(checkpoints, "llava")
    refused = pytest.raises(RequestError, match=r"vision_tower.*what encodes images")
    with LLM(str(base), num_blocks=8, enable_lora=True) as llm, refused:
        llm.add_lora(LoRARequest("bad", 1, folder))


def test_limits_are_named(llm: LLM, adapters: Path, monkeypatch: pytest.MonkeyPatch):
    sql = LoRARequest("sql", 1, adapters / "sql")
    for setting, value in (("max_lora_rank", 3), ("max_lora_bytes", 5000), ("enable_lora", False)):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "adapters", _limited(llm, setting, value))
            with pytest.raises(RequestError, match=setting):
                llm.add_lora(sql)
    llm.add_lora(sql)
    with pytest.raises(RequestError, match="lora_int_id=1 is that of 'sql'"):
        llm.add_lora(LoRARequest("fr", 1, adapters / "fr"))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "adapters", _limited(llm, "max_loras", 1))
        llm.add_lora(sql)
        with pytest.raises(RequestError, match="max_loras=1"):
            llm.add_lora(LoRARequest("fr", 2, adapters / "fr"))
    with pytest.raises(ConfigError, match="max_lora_rank=513"):
        LLM(enable_lora=True, max_lora_rank=513)
    with pytest.raises(RequestError, match="lora_int_id=0"):
        LoRARequest("sql", 0, adapters / "sql")
    with pytest.raises(RequestError, match="2 lora_request for 1 prompts"):
        llm.generate([PROMPT], ONE, lora_request=[sql, None], use_tqdm=False)


def _limited(llm: LLM, setting: str, value: Any) -> Adapters:
    return Adapters(replace(llm.engine.config, **{setting: value}), llm.engine.runner.adapters)


def test_other_weights_of_the_same_size_and_time_are_loaded(
    llm: LLM, adapters: Path, tmp_path: Path
):
    """Written over in place, with the time of modification set back."""
    folder = rewritten(adapters / "sql", tmp_path / "sql")
    request, weights = LoRARequest("sql", 1, folder), folder / "adapter_model.safetensors"
    assert llm.add_lora(request) and not llm.add_lora(request)
    before = weights.stat()
    weights.write_bytes((rewritten(folder, tmp_path / "x", weights=2) / weights.name).read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert llm.add_lora(request)

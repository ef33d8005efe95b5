"""Models with sliding windows: a long request holds what its window says, and answers the same.

Tiny Gemma 3 (every second layer sees 8 tokens) and tiny Mistral (every layer does), in blocks of
four.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.lab.size.kv_bytes import kv_bytes
from ostinato.settings import window_blocks
from tests.support.cache.cache_views import windows_of
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.model_families import FAMILIES, WINDOW

pytestmark = pytest.mark.one_case_in(3)

SIZE = 4
PROMPT = [3 + i * i % 311 for i in range(90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

of_both_kinds = pytest.mark.parametrize("family", ["gemma3_text", "mistral"])


def generate(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Return the answer, and how many tokens of the prompt hit."""
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def held_while_running(llm: LLM, prompt: list[int]) -> list[tuple[int, int, int]]:
    """Run a request; return its computed tokens and the blocks held per group, step by step."""
    scheduler, seen = llm.engine.scheduler, []
    commit = scheduler.commit

    def watched(result: Any) -> Any:
        updates = commit(result)
        for sequence in scheduler.requests.running:
            full, window = sequence.table.groups
            null = windows_of(llm.engine.cache.manager)[0].null_block
            held = sum(block != null for block in window)
            seen.append((sequence.num_computed, len(full), held))
        return updates

    scheduler.commit = watched
    generate(llm, prompt)
    scheduler.commit = commit
    return seen


@of_both_kinds
def test_a_long_request_holds_of_its_window_no_more_than_that_sees(family: str, make_llm: MakeLLM):
    """After every step; full attention keeps all."""
    llm = make_llm(family, num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)

    seen = held_while_running(llm, PROMPT)

    assert seen[-1][0] == len(PROMPT) + 14, "the last token of all is not computed"
    for computed, full, window in seen:
        assert full >= -(-computed // SIZE)
        assert window <= window_blocks(WINDOW, SIZE)
    assert max(window for _, _, window in seen) == window_blocks(WINDOW, SIZE)


@of_both_kinds
def test_answers_are_those_without_a_cache_whatever_was_evicted_from_the_window(
    family: str, index: str, make_llm: MakeLLM
):
    """What the window has cached is evicted between two of them; group 0 forgets nothing."""
    plain = make_llm(family, enable_prefix_caching=False, num_blocks=64)
    llm = make_llm(family, index=index, num_blocks=200, max_num_batched_tokens=16, max_num_seqs=4)
    window = windows_of(llm.engine.cache.manager)[0]
    first, other = PROMPT[:50], [7, *PROMPT]
    expected = generate(plain, first)[0], generate(plain, other)[0]

    assert generate(llm, first) == (expected[0], 0)
    assert generate(llm, first) == (expected[0], 49), "all but the last token"
    copies = set(window.copies())
    llm.engine.cache.manager.remove(lambda entry: entry in copies)
    assert generate(llm, first) == (expected[0], 0), "the window is gone, so nothing hits"
    assert generate(llm, first)[1] == 49, "and it is whole again"
    assert generate(llm, other) == (expected[1], 0)


@of_both_kinds
def test_answers_are_exact_under_pressure_in_every_group(family: str, make_llm: MakeLLM):
    """Pools for the longest sequence and a little more, and six that want to run."""
    plain = make_llm(family, enable_prefix_caching=False, num_blocks=256)
    llm = make_llm(family, num_blocks=30, max_num_batched_tokens=24, max_num_seqs=6)
    prompts = [PROMPT[:cut] for cut in (20, 41, 58, 90)] * 2

    expected = plain.generate(prompts, GREEDY, use_tqdm=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)

    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert llm.engine.scheduler_stats.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token_of_engine_and_size_command_agree(
    family: str, checkpoints: Checkpoints, make_llm: MakeLLM
):
    """Per layer group, as the engine's stores have them; those of ``size`` from the config."""
    path = checkpoints.path(family)
    llm = make_llm(family, num_blocks=8)
    runner = llm.engine.runner
    spec, groups = llm.engine.loaded.kv_spec, runner.groups
    assert runner.kv_stores[0].dtype == torch.float64

    for name in ("float64", "int8"):
        ours = {
            window: groups.bytes_per_token(spec, group, getattr(torch, name))
            for group, window in enumerate((None, *groups.windows))
            if groups.layers(group)
        }
        theirs: dict[int | None, int] = {}
        for each in kv_bytes(_config(path), name).groups:
            window = each.layer.window_tokens
            kept = each.token_bytes if each.expanded_bytes is None else each.expanded_bytes
            theirs[window] = theirs.get(window, 0) + kept
        assert ours == theirs
    in_cache = [window.window for window in windows_of(llm.engine.cache.manager)]
    assert in_cache == sorted(window for window in theirs if window is not None)


def _config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    assert isinstance(config, dict)
    return config

"""The number of tokens that a shared prefix saves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import ConfigError
from ostinato.lab.simulate.savings import Reuse, Workload, by_token, by_whole_blocks, without_cache


@pytest.mark.parametrize(
    ("workload", "by_block", "saved"),
    [
        (Workload(512, 16, 1000), 999 * 512, 511_488),
        (Workload(512, 1, 1000, block_size=512), 999 * 512, 511_488),
        (Workload(512, 1, 1000, block_size=100), 999 * 500, 511_488),
        (Workload(512, 1, 1000, block_size=1024), 0, 511_488),
        (Workload(512, 0, 1000), 999 * 496, 511_488 - 999),
        (Workload(4097, 100, 2), 4096, 4097),
    ],
)
def test_a_thousand_calls_with_one_system_prompt_save_511_488_tokens(
    workload: Workload, by_block: int, saved: int
):
    """The article's figure: 999 x 512, if every call brings a token of its own: of identical
    prompts each computes one (law 4). By whole blocks, it needs a size that divides the prefix."""
    assert by_whole_blocks(workload).saved_tokens == by_block
    assert by_token(workload).saved_tokens == saved


@pytest.mark.parametrize(("shared", "requests"), [(512, 1), (0, 9)])
def test_a_single_request_saves_nothing_nor_do_requests_that_share_nothing(shared, requests):
    assert by_token(Workload(shared, 16, requests)).saved_share == 0


def test_a_block_that_no_prompt_fills_can_be_copied_only_after_its_request_has_ended():
    """5 + 4 tokens never fill a block of 16; 4,097 + 100 fill the one where they part."""
    assert by_token(Workload(5, 4, 3, block_size=16)).needs_a_sealed_tail
    assert not by_token(Workload(4097, 100, 3, block_size=16)).needs_a_sealed_tail
    assert not by_token(Workload(512, 0, 3, block_size=16)).needs_a_sealed_tail
    assert not by_token(Workload(512, 1, 3, block_size=16)).needs_a_sealed_tail


@pytest.mark.parametrize(
    ("shared", "suffix", "requests", "block_size", "named"),
    [
        (-1, 16, 10, 16, "shared=-1"),
        (512, -1, 10, 16, "suffix=-1"),
        (512, 16, 0, 16, "requests=0"),
        (512, 16, 10, 0, "block_size=0"),
        (0, 0, 10, 16, "shared=0 and suffix=0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(shared, suffix, requests, block_size, named):
    with pytest.raises(ConfigError, match=named):
        Workload(shared, suffix, requests, block_size)


workloads = st.builds(
    Workload,
    shared_tokens=st.integers(1, 40),
    suffix_tokens=st.integers(0, 9),
    num_requests=st.integers(1, 5),
    block_size=st.integers(1, 12),
)


@given(workloads)
def test_whole_blocks_agree_with_a_cache_that_remembers_them(workload: Workload):
    """The oracle serves every prompt in turn and remembers all prefixes of whole blocks."""
    assert by_whole_blocks(workload).computed_tokens == served(workload, workload.block_size)


@given(workloads)
def test_by_token_agrees_with_a_cache_that_remembers_every_prefix(workload: Workload):
    """The block size decides what is copied, and never how much is computed."""
    reuse = by_token(workload)

    assert reuse.computed_tokens == served(workload, granularity=1)
    assert reuse.matched_tokens % workload.block_size == 0
    assert 0 <= reuse.copied_tokens < workload.block_size


@given(workloads)
def test_figures_add_up_and_finer_caches_save_more(workload: Workload):
    """Nothing is counted twice, and every request computes at least one token."""
    steps: list[Reuse] = [without_cache(workload), by_whole_blocks(workload), by_token(workload)]

    for reuse in steps:
        assert reuse.computed_tokens + reuse.saved_tokens == workload.total_tokens
        assert reuse.computed_per_request_tokens >= 1
    assert sorted(steps, key=lambda reuse: reuse.saved_tokens) == steps


def served(workload: Workload, granularity: int) -> int:
    """Tokens that a slow and obvious cache computes: it keeps prefixes of this granularity."""
    remembered: set[tuple[str, ...]] = {()}
    computed = 0
    for request in range(workload.num_requests):
        own = [f"own {request}"] * workload.suffix_tokens
        prompt = tuple(["shared"] * workload.shared_tokens + own)
        ends = range(0, len(prompt) + 1, granularity)
        hit = max(end for end in ends if end < len(prompt) and prompt[:end] in remembered)
        computed += len(prompt) - hit
        remembered |= {prompt[:end] for end in ends}
    return computed

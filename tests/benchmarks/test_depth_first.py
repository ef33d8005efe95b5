"""The depth-first walk over what waits."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.depth_first import depth_first
from ostinato.core.identity import ImageSpan
from ostinato.sched.sequence import Sequence
from tests.support.tiny_scheduler import make_sequence


def naive_walk(waiting: list[Sequence], num_cached: list[int]) -> list[Sequence]:
    """Walk a trie with a node per token, drawn from the definition."""
    cached = dict(zip(waiting, num_cached, strict=True))

    def weigh(branch: list[Sequence]) -> tuple[int, int, int]:
        longest = max(cached[s] for s in branch)
        return -longest, -len(branch), min(s.sequence_id for s in branch)

    def visit(branch: list[Sequence], depth: int) -> list[Sequence]:
        here = sorted((s for s in branch if len(s.key) == depth), key=lambda s: s.sequence_id)
        forks = defaultdict(list)
        for sequence in branch:
            if len(sequence.key) > depth:
                forks[sequence.key.tokens[depth]].append(sequence)
        for fork in sorted(forks.values(), key=weigh):
            here += visit(fork, depth + 1)
        return here

    trees = defaultdict(list)
    for sequence in waiting:
        trees[sequence.key.identity].append(sequence)
    return [s for tree in sorted(trees.values(), key=weigh) for s in visit(tree, 0)]


prompts = st.text("ABC", min_size=1, max_size=7)
crowds = st.lists(
    st.tuples(prompts, st.sampled_from(["", "", "t"]), st.integers(0, 4)), max_size=14
)


@given(crowds)
def test_the_order_is_that_of_a_walk_over_a_naive_trie(crowd: list[tuple[str, str, int]]):
    waiting = [
        make_sequence(i, prompt, tenant=tenant) for i, (prompt, tenant, _) in enumerate(crowd)
    ]
    cached = [num_cached for _, _, num_cached in crowd]
    assert list(depth_first(waiting, cached)) == naive_walk(waiting, cached)


pictures = st.sampled_from([(), (ImageSpan(b"cat", 1, 2),), (ImageSpan(b"dog", 1, 2),)])


@given(st.lists(st.tuples(st.text("AB", min_size=3, max_size=6), pictures), max_size=9))
def test_sequences_that_share_a_prefix_stand_together_also_with_images(crowd):
    """Between two that share some tokens stands none that shares fewer with either."""
    waiting = [
        make_sequence(i, text[0] + "ii" + text[3:] if images else text, images=images)
        for i, (text, images) in enumerate(crowd)
    ]
    walk = list(depth_first(waiting, [0] * len(waiting)))
    assert sorted(s.sequence_id for s in walk) == list(range(len(waiting)))
    for i, first in enumerate(walk):
        for j in range(i + 2, len(walk)):
            common = first.key.num_common_tokens(walk[j].key)
            between = [first.key.num_common_tokens(s.key) for s in walk[i + 1 : j]]
            assert min(between) >= common


def test_turns_that_nest_a_thousand_deep_are_walked_without_recursion():
    waiting = [make_sequence(i, "A" * (1200 - i)) for i in range(1200)]
    walk = list(depth_first(waiting, [0] * len(waiting)))
    assert walk == waiting[::-1]

"""The sorted siblings find what a look at each of them would find."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.child_index import ChildIndex

runs = st.lists(st.sampled_from([0, 1, 255, 256, 2**32 - 1]), max_size=5).map(tuple)


def packed(run: tuple[int, ...]) -> bytes:
    """Four bytes a token."""
    return array("I", run).tobytes()


def num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Tokens that two runs begin with alike, one by one."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(family=st.lists(runs, unique=True, max_size=12), query=runs)
def test_the_most_alike_is_the_longest_common_beginning_of_all(family, query):
    siblings: ChildIndex[tuple[int, ...]] = ChildIndex()
    for run in family:
        siblings.add(None, packed(run), run)
    best = siblings.longest_common_prefix(packed(query))
    most = max((num_common(run, query) for run in family), default=0)
    if most == 0:
        assert best is None
    else:
        assert best is not None and best[1] == most == num_common(best[0], query)


@given(st.data(), st.lists(runs, unique=True, min_size=1, max_size=8))
def test_what_is_taken_out_is_found_no_more(data, family):
    siblings: ChildIndex[tuple[int, ...]] = ChildIndex()
    for run in family:
        siblings.add(packed(run), packed(run), run)
    gone = data.draw(st.sampled_from(family))
    siblings.remove(packed(gone), packed(gone), gone)

    assert siblings.get(packed(gone)) is None
    assert sorted(siblings) == sorted(run for run in family if run != gone)
    assert len(siblings) == len(family) - 1 and bool(siblings) == (len(family) > 1)
    for run in family:
        found = siblings.longest_common_prefix(packed(run))
        assert found is None or found[0] != gone


def test_variants_of_an_image_share_a_text_and_keep_their_names():
    siblings: ChildIndex[str] = ChildIndex()
    siblings.add(b"text+cat", packed((1,)), "cat")
    siblings.add(b"text+dog", packed((1,)), "dog")
    assert siblings.get(b"text+dog") == "dog"
    assert siblings.longest_common_prefix(packed((1, 2))) == ("cat", 1)
    siblings.remove(b"text+cat", packed((1,)), "cat")
    assert siblings.longest_common_prefix(packed((1, 2))) == ("dog", 1)


def test_a_sibling_that_takes_anothers_place_is_found_both_ways():
    siblings: ChildIndex[str] = ChildIndex()
    siblings.add(b"block", packed((1, 2)), "whole")
    siblings.replace(b"block", packed((1, 2)), "whole", "head")
    assert siblings.get(b"block") == "head"
    assert siblings.longest_common_prefix(packed((1, 3))) == ("head", 1)
    assert list(siblings) == ["head"]


@given(
    family=st.lists(runs, unique=True, max_size=12),
    query=runs,
    numbers=st.permutations([0, 1, 255, 256, 2**32 - 1]),
)
def test_of_equals_the_last_one_is_taken_whatever_numbers_the_tokens_have(family, query, numbers):
    """A replay knows tokens by other numbers, and copies from the same blocks all the same."""
    other = dict(zip([0, 1, 255, 256, 2**32 - 1], numbers, strict=True))
    plain: ChildIndex[int] = ChildIndex()
    renamed: ChildIndex[int] = ChildIndex()
    for place, run in enumerate(family):
        plain.add(None, packed(run), place)
        renamed.add(None, packed(tuple(other[token] for token in run)), place)

    best = plain.longest_common_prefix(packed(query))
    assert best == renamed.longest_common_prefix(packed(tuple(other[token] for token in query)))
    if best is not None:
        equals = [p for p, run in enumerate(family) if num_common(run, query) == best[1]]
        assert best[0] == equals[-1]


def test_among_many_that_begin_alike_the_last_one_is_taken_as_well():
    """Ten of a thousand begin with 7, and so do all but ten of another thousand."""
    for few in (True, False):
        siblings: ChildIndex[int] = ChildIndex()
        for place in range(1000):
            begins_alike = (place % 100 == 0) == few
            siblings.add(None, packed((7 if begins_alike else 8, place)), place)
        assert siblings.longest_common_prefix(packed((7, 2000))) == (900 if few else 999, 1)

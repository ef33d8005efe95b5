"""The sorted siblings find what a look at each of them would find."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.siblings import Siblings

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
    siblings: Siblings[tuple[int, ...]] = Siblings()
    for run in family:
        siblings.add(None, packed(run), run)
    best = siblings.most_alike(packed(query))
    most = max((num_common(run, query) for run in family), default=0)
    if most == 0:
        assert best is None
    else:
        assert best is not None and best[1] == most == num_common(best[0], query)


@given(st.data(), st.lists(runs, unique=True, min_size=1, max_size=8))
def test_what_is_taken_out_is_found_no_more(data, family):
    siblings: Siblings[tuple[int, ...]] = Siblings()
    for run in family:
        siblings.add(packed(run), packed(run), run)
    gone = data.draw(st.sampled_from(family))
    siblings.remove(packed(gone), packed(gone), gone)

    assert siblings.get(packed(gone)) is None
    assert sorted(siblings) == sorted(run for run in family if run != gone)
    assert len(siblings) == len(family) - 1 and bool(siblings) == (len(family) > 1)
    for run in family:
        found = siblings.most_alike(packed(run))
        assert found is None or found[0] != gone


def test_variants_of_an_image_share_a_text_and_keep_their_names():
    siblings: Siblings[str] = Siblings()
    siblings.add(b"text+cat", packed((1,)), "cat")
    siblings.add(b"text+dog", packed((1,)), "dog")
    assert siblings.get(b"text+dog") == "dog"
    assert siblings.most_alike(packed((1, 2))) == ("cat", 1)
    siblings.remove(b"text+cat", packed((1,)), "cat")
    assert siblings.most_alike(packed((1, 2))) == ("dog", 1)


def test_a_sibling_that_takes_anothers_place_is_found_both_ways():
    siblings: Siblings[str] = Siblings()
    siblings.add(b"block", packed((1, 2)), "whole")
    siblings.replace(b"block", packed((1, 2)), "whole", "head")
    assert siblings.get(b"block") == "head"
    assert siblings.most_alike(packed((1, 3))) == ("head", 1)
    assert list(siblings) == ["head"]

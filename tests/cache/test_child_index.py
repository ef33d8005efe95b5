"""The sorted siblings find what a look at each of them would find."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.child_index import ChildIndex
from ostinato.core.identity import BlockKey, Identity, ImageSpan, PrefixKey

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
        siblings.add(packed(run), run)
    best, alike = siblings.closest(packed(query))
    most = max((num_common(run, query) for run in family), default=0)
    assert alike == most == (0 if best is None else num_common(best, query))


@given(st.data(), st.lists(runs, unique=True, min_size=1, max_size=8))
def test_what_is_taken_out_is_found_no_more(data, family):
    siblings: ChildIndex[tuple[int, ...]] = ChildIndex()
    for run in family:
        siblings.add(packed(run), run)
    gone = data.draw(st.sampled_from(family))
    siblings.remove(packed(gone))

    assert siblings.get(packed(gone)) is None
    assert sorted(siblings) == sorted(run for run in family if run != gone)
    assert len(siblings) == len(family) - 1 and bool(siblings) == (len(family) > 1)
    for run in family:
        assert siblings.closest(packed(run))[0] != gone


def test_a_name_is_as_alike_as_the_tokens_and_images_before_it():
    """One cat and one dog at the same place: alike up to there, and another name."""
    tokens = array("I", [1, 9, 9, 2])
    cat, dog = (PrefixKey(Identity(), tokens, [ImageSpan(x, 1, 2)]) for x in (b"cat", b"dog"))
    names = [key.block_key(0, 4).child_name for key in (cat, dog)]
    text = PrefixKey(Identity(), tokens).block_key(0, 4).child_name

    assert [name[:4] == packed((1,)) for name in names] == [True, True]
    assert len({text[4:8], *(name[4:8] for name in names)}) == 3
    assert all(name[8:16] == text[8:] for name in names)


def test_words_that_collide_share_what_is_before_them():
    """A name has four bytes of an image's digest: what is shared is counted by all of it."""
    tokens = packed((1, 9, 9, 2))
    cat, dog = (BlockKey(tokens, (ImageSpan(x, 1, 2),), 0) for x in (b"cat", b"dog"))
    text = BlockKey(tokens, (), 0)
    assert cat.num_common_tokens(dog) == cat.num_common_tokens(text) == 1
    assert cat.num_common_tokens(cat._replace(tokens=tokens[:12])) == 3
    assert cat.num_common_tokens(cat._replace(tokens=tokens[:8])) == 1, "of an image all or none"


def test_a_sibling_that_takes_anothers_place_is_found_both_ways():
    siblings: ChildIndex[str] = ChildIndex()
    siblings.add(packed((1, 2)), "whole")
    siblings.replace(packed((1, 2)), "head")
    assert siblings.get(packed((1, 2))) == "head"
    assert siblings.closest(packed((1, 3))) == ("head", 1)
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
        plain.add(packed(run), place)
        renamed.add(packed(tuple(other[token] for token in run)), place)

    best, most = plain.closest(packed(query))
    assert (best, most) == renamed.closest(packed(tuple(other[token] for token in query)))
    if best is not None:
        assert best == max(p for p, run in enumerate(family) if num_common(run, query) == most)


def test_among_many_that_begin_alike_the_last_one_is_taken_as_well():
    """Ten of a thousand begin with 7, and so do all but ten of another thousand."""
    for few in (True, False):
        siblings: ChildIndex[int] = ChildIndex()
        for place in range(1000):
            begins_alike = (place % 100 == 0) == few
            siblings.add(packed((7 if begins_alike else 8, place)), place)
        assert siblings.closest(packed((7, 2000))) == (900 if few else 999, 1)

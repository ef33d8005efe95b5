"""Pseudonyms keep common beginnings to the token, and tell nothing else."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.identity import ImageSpan, derive_salt, tenant_of
from ostinato.core.tokens import num_common_tokens
from ostinato.errors import BrokenTrace
from ostinato.traces.anonymizer import TokenHasher, unpack_names

rows = st.lists(st.integers(0, 2), max_size=12).map(lambda tokens: array("I", tokens))


@given(left=rows, right=rows)
def test_two_prompts_begin_alike_exactly_as_far_as_their_pseudonyms_do(left, right):
    names = TokenHasher()
    mine, theirs = (bytes(names.prompt(tokens).names) for tokens in (left, right))
    common = num_common_tokens(left.tobytes(), right.tobytes())
    assert num_common_tokens(mine, theirs) == common
    assert not set(unpack_names(mine)[common:]) & set(unpack_names(theirs)[common:])


@given(prompt=rows, output=rows)
def test_an_answer_goes_on_where_its_prompt_ended(prompt, output):
    names = TokenHasher()
    chain = names.prompt(prompt)
    answer = chain.continued(output)
    assert bytes(chain.names) + answer == bytes(names.prompt(prompt + output).names)
    assert chain.continued(output) == answer, "the prompt's chain has stayed as it was"


def test_equal_tokens_in_other_places_or_under_another_key_have_other_names():
    same = array("I", [7] * 50)
    names = unpack_names(bytes(TokenHasher().prompt(same).names))
    again = unpack_names(bytes(TokenHasher().prompt(same).names))
    assert len(set(names)) == 50 and not set(names) & set(again) and 7 not in names


def test_what_comes_after_an_image_is_named_after_its_content():
    names, tokens = TokenHasher(), array("I", [1, 2, 9, 9, 3])
    red, blue = (
        bytes(names.prompt(tokens, [ImageSpan(digest, 2, 2)]).names) for digest in (b"red", b"blue")
    )
    assert num_common_tokens(red, blue) == 2


def test_a_narrowed_salt_still_shows_whose_it_is():
    names = TokenHasher()
    ann, narrow = (names.salt(s.encode()) for s in ("ann", derive_salt("ann", "x")))
    assert tenant_of(narrow.encode()) == ann.encode() and narrow != ann
    assert names.salt(b"bob") not in (ann, narrow) and names.salt(b"") == ""


def test_bytes_that_are_no_whole_number_of_names_are_refused():
    with pytest.raises(BrokenTrace, match="3 bytes are no whole number"):
        unpack_names(b"abc")

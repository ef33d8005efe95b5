"""Token ids are checked once and packed; packed runs compare as lists do."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import TokenOutOfRange
from ostinato.core.tokens import MAX_TOKEN_ID, num_common_tokens, pack_tokens

ids = st.lists(st.sampled_from([0, 1, 255, 256, 65_536, MAX_TOKEN_ID]), max_size=300)


@given(ids)
def test_a_token_takes_four_bytes_little_endian(tokens):
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    for same in (tokens, tuple(tokens), np.array(tokens, dtype=np.int64), iter(tokens)):
        assert pack_tokens(same).tobytes() == expected


@given(ids, ids, ids)
def test_common_tokens_are_counted_as_one_would_by_hand(beginning, left, right):
    one, other = beginning + left, beginning + right
    pairs = enumerate(zip(one, other, strict=False))
    expected = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    assert num_common_tokens(pack_tokens(one).tobytes(), pack_tokens(other).tobytes()) == expected


@pytest.mark.parametrize("length", [63, 64, 65, 191, 192, 193, 5_000])
def test_a_difference_is_found_wherever_it_is(length):
    """Around the widths in which runs are compared: 256 bytes, then twice as many."""
    run = pack_tokens(range(length))
    for position in {0, 62, 63, 64, 191, 192, length - 1} & set(range(length)):
        other = run[:]
        other[position] += 1
        assert num_common_tokens(run.tobytes(), other.tobytes()) == position
    assert num_common_tokens(run.tobytes(), run.tobytes()) == length


def test_packing_an_array_copies_it():
    tokens = array("I", [1, 2])
    packed = pack_tokens(tokens)
    tokens[0] = 9
    assert list(packed) == [1, 2]


def test_the_message_names_the_id_and_its_position():
    with pytest.raises(TokenOutOfRange, match="token id -5 at position 2"):
        pack_tokens([1, 2, -5, -6])
    with pytest.raises(TokenOutOfRange, match="token id 'x' at position 1"):
        pack_tokens([1, "x"])
    with pytest.raises(TokenOutOfRange, match="token id 4294967296 at position 0"):
        pack_tokens(np.array([2**32]))


@pytest.mark.parametrize("tokens", [np.array([1.0]), np.array([[1]]), np.array([True])])
def test_arrays_that_are_no_row_of_integers_are_refused(tokens):
    with pytest.raises(TokenOutOfRange, match="one row of integers"):
        pack_tokens(tokens)

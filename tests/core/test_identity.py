"""What must be equal before KV may be shared (law 3)."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.errors import RequestError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey

short = st.sampled_from([b"", b"a", b"b", b"ab", b"\0", b"\0\0\0\0"])
plain = st.builds(
    Identity,
    weights=short,
    epoch=st.integers(0, 2),
    kv_dtype=st.sampled_from(["", "a", "ab"]),
    adapter=short,
    tenant=short,
)
identities = st.recursive(
    plain,
    lambda bases: st.builds(
        lambda base, num_more, tenant: replace(
            base, base=base, start=base.start + num_more, tenant=tenant
        ),
        bases,
        st.integers(1, 2),
        short,
    ),
    max_leaves=3,
)


@given(identities, identities)
def test_identities_are_equal_if_and_only_if_their_encodings_are(one, other):
    """No field can pass for a part of its neighbour."""
    assert (one == other) == (one.encoded == other.encoded)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_sequences_of_one_identity_share_their_common_tokens(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    expected = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    left, right = PrefixKey(Identity(), one), PrefixKey(Identity(), other)
    assert left.num_common_tokens(right) == right.num_common_tokens(left) == expected
    assert left.num_common_tokens(PrefixKey(Identity(epoch=1), other)) == 0


CAT, DOG = ImageSpan(b"cat", 2, 3), ImageSpan(b"dog", 2, 3)


OTHERS = {
    "no image": (),
    "another image": (DOG,),
    "another length": (ImageSpan(b"cat", 2, 4),),
    "another place": (ImageSpan(b"cat", 3, 3),),
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_sequences_share_nothing_from_the_first_image_on_that_differs(others):
    one, other = (PrefixKey(Identity(), [7] * 12, images) for images in ((CAT,), others))
    assert one.num_common_tokens(other) == other.num_common_tokens(one) == 2


def test_behind_an_equal_image_sequences_share_on_up_to_the_next():
    tokens = [7] * 12
    key = PrefixKey(Identity(), tokens, [CAT, ImageSpan(b"emu", 8, 1)])
    assert key.num_common_tokens(PrefixKey(Identity(), tokens, [CAT])) == 8
    assert key.num_common_tokens(PrefixKey(Identity(), tokens[:7], [CAT])) == 7
    assert key.num_common_tokens(key.copy()) == 12


@pytest.mark.parametrize(
    "images",
    [
        [ImageSpan(b"", 3, 2)],
        [ImageSpan(b"", -1, 2)],
        [ImageSpan(b"", 0, 0)],
        [ImageSpan(b"", 0, 2), ImageSpan(b"", 1, 2)],
    ],
    ids=["leaves the prompt", "before it", "empty", "overlap"],
)
def test_images_that_overlap_or_leave_the_prompt_are_refused(images):
    with pytest.raises(RequestError, match="prompt of 4 tokens"):
        PrefixKey(Identity(), [1, 2, 3, 4], images)


@pytest.mark.parametrize("fields", [{"tenant": b"ann"}, {"adapter": b"judge"}], ids=str)
@pytest.mark.parametrize(("start", "is_inside"), [(2, False), (3, True), (5, True), (6, False)])
def test_an_identity_does_not_begin_inside_an_image(fields, start, is_inside):
    """Half of the cat would be another tenant's, or computed by another adapter."""
    identity, cat = Identity(base=Identity(), start=start, **fields), ImageSpan(b"cat", 2, 4)
    if is_inside:
        with pytest.raises(RequestError, match=f"begins at token {start}, inside the image at"):
            PrefixKey(identity, range(10), [cat])
    else:
        assert len(PrefixKey(identity, range(10), [cat])) == 10


def test_an_extra_tells_an_image_to_each_block_that_it_reaches_into():
    key = PrefixKey(Identity(), range(12), [CAT])
    assert key.block_key(0, 2).extra == key.block_key(5, 8).extra == b""
    for start in (0, 4):
        assert key.block_key(start, start + 4).spans == (CAT,)
        assert key.block_key(start, start + 4).extra == CAT.extra(start)


def test_a_copy_goes_its_own_way():
    key = PrefixKey(Identity(), [1, 2])
    twin = key.copy()
    twin.append(3)
    assert (list(key.tokens), list(twin.tokens)) == ([1, 2], [1, 2, 3])
    key.append(4)
    assert key.tokens.tobytes()[8:] == (4).to_bytes(4, "little")
    assert twin.tokens[2:3].tobytes() == (3).to_bytes(4, "little")


def test_a_key_under_other_weights_goes_its_own_way():
    """Waiting sequences are renewed while their old key may still be read."""
    key = PrefixKey(Identity(), [1, 2])
    twin = CacheManager(CacheConfig(num_blocks=2)).rekey(key)
    key.append(3)
    twin.append(4)
    assert (list(key.tokens), list(twin.tokens)) == ([1, 2, 3], [1, 2, 4])


def test_new_weights_renew_all_that_an_identity_continues():
    own = Identity(tenant=b"ann", base=Identity(tenant=b"public"), start=4)
    new = own.renewed(b"w", 2)
    assert [(x.weights, x.epoch, x.tenant) for x in new.stages] == [
        (b"w", 2, b"public"),
        (b"w", 2, b"ann"),
    ]


def test_the_packed_view_keeps_up_with_appended_tokens():
    key = PrefixKey(Identity(), [1])
    assert 4 * len(key.tokens) == 4
    key.append(2)
    assert 4 * len(key.tokens) == 8
    assert key.tokens[1:2].tobytes() == (2).to_bytes(4, "little")


def test_a_packed_prompt_is_shared_until_the_first_token_comes():
    prompt = array("I", [1, 2, 3])
    key = PrefixKey(Identity(), prompt)
    assert key.tokens is prompt
    key.append(4)
    key.append(5)
    assert (prompt.tolist(), key.tokens.tolist()) == ([1, 2, 3], [1, 2, 3, 4, 5])


def test_copies_of_a_key_go_on_apart():
    one = PrefixKey(Identity(), [1, 2])
    one.append(3)
    other = one.copy()
    for key, token in ((one, 4), (other, 5), (one, 6)):
        key.append(token)
    assert (one.tokens.tolist(), other.tokens.tolist()) == ([1, 2, 3, 4, 6], [1, 2, 3, 5])

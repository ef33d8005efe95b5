"""What is special about the hash index: digests, collisions, copies of the same content."""

import hashlib
import struct

import numpy as np
import pytest

from ostinato.core.errors import TokenOutOfRange
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.indexes.block_hash import BlockHasher, make_digest, sha256
from tests.support.cache.tiny_cache import TinyCache, tiny_cache


def hash_cache(num_blocks: int, **settings) -> TinyCache:
    """A tiny cache with the hash index."""
    return tiny_cache(num_blocks, 4, index="hash", **settings)


def digests(key: PrefixKey, num_blocks: int, block_size: int = 4) -> list[BlockDigest]:
    """The SHA-256 chain of a key's first blocks."""
    return BlockHasher(block_size, sha256).digests(key, num_blocks)


# --- digests --------------------------------------------------------------------------------


def test_a_digest_is_what_hashlib_says_of_parent_and_packed_tokens():
    """The layout, byte by byte: five fields behind their lengths, then four bytes a token."""
    identity = Identity(weights=b"w", epoch=3, kv_dtype="f4", adapter=b"", tenant=b"somebody")
    fields = [b"w", struct.pack("<Q", 3), b"f4", b"", b"somebody"]
    root = hashlib.sha256(b"".join(struct.pack("<I", len(f)) + f for f in fields)).digest()
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()

    assert digests(PrefixKey(identity, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9]), 2) == [first, second]


def test_the_digest_of_a_known_block_never_changes():
    """Tiers and other machines keep digests: another value needs another version of theirs."""
    assert digests(PrefixKey(Identity(), [1, 2, 3, 4]), 1)[0].hex() == (
        "0b8db54ddfa8c70b10d715682b5feb2f264b0abcaa943073ec2a3abcac9dbede"
    )


def test_an_image_adds_its_content_offset_and_length_to_the_blocks_it_touches():
    """Five image tokens from position 2 on: offset 2 in the first block, -2 in the second."""
    key = PrefixKey(Identity(), range(12), [ImageSpan(b"cat", 2, 5)])
    parent = hashlib.sha256(key.identity.encoded).digest()
    for index, offset in enumerate([2, -2, None]):
        block = struct.pack("<4I", *range(4 * index, 4 * index + 4))
        if offset is not None:
            block += struct.pack("<I3sqQ", 3, b"cat", offset, 5)
        parent = hashlib.sha256(parent + block).digest()
        assert digests(key, 3)[index] == parent


@pytest.mark.parametrize(
    "tokens",
    [
        (7, 8, 9, 10),
        np.array([7, 8, 9, 10]),
        np.array([7, 8, 9, 10], dtype=np.uint8),
        [np.int64(7), np.int32(8), np.uint64(9), 10],
        range(7, 11),
        (token for token in (7, 8, 9, 10)),
    ],
    ids=["tuple", "int64 array", "uint8 array", "list of NumPy ints", "range", "generator"],
)
def test_the_same_ids_give_the_same_digest_whatever_holds_them(tokens):
    expected = digests(PrefixKey(Identity(), [7, 8, 9, 10]), 1)
    assert digests(PrefixKey(Identity(), tokens), 1) == expected


@pytest.mark.parametrize(
    "tokens", [[1, -1], [2**32], (1, 2.0), ["a"], [None], np.array([-1]), np.array([2**32])]
)
def test_ids_that_do_not_fit_four_bytes_are_refused(tokens):
    with pytest.raises(TokenOutOfRange, match="from 0 to 4294967295"):
        PrefixKey(Identity(), tokens)


def test_each_block_is_hashed_once_however_often_it_is_looked_up():
    """Root and two blocks; the look-ups behind them find the digests in the key."""
    hashed = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return sha256(data)

    key, hasher = PrefixKey(Identity(), range(12)), BlockHasher(4, counting)
    hasher.digests(key, 2)
    hasher.digests(key, 2)
    assert len(hashed) == 3
    hasher.digests(key.copy(), 3)
    assert len(hashed) == 4, "a copy of the key remembers them too"


def test_the_fast_digest_is_seeded_by_process_and_fit_for_one():
    one, other = make_digest("xxh3_128"), make_digest("xxh3_128")
    assert one(b"block") == one(b"block") and len(one(b"block")) == 16
    assert one(b"block") != other(b"block")
    assert make_digest("sha256")(b"block") == hashlib.sha256(b"block").digest()
    assert len(make_digest("xxh3_128")(b"block")) == 16


# --- collisions -----------------------------------------------------------------------------


def colliding_cache(num_blocks: int) -> TinyCache:
    """A cache whose digests all collide, as an attacker could wish."""
    return hash_cache(num_blocks, digest=lambda data: b"same")


def test_colliding_digests_never_serve_a_wrong_block():
    cache = colliding_cache(8)
    cache.serve("ABCDEFGH")
    assert cache.match("XXXXEFGH?").num_tokens == 0
    assert cache.match("ABCDXXXX?").num_tokens == 4
    assert cache.match("EFGHABCD?").num_tokens == 0
    assert cache.match("ABCDEFGH?", tenant=b"somebody").num_tokens == 0
    assert cache.match("ABCDEFGH?").num_tokens == 8


# --- copies of one content ------------------------------------------------------------------


def twice(num_blocks: int, **settings) -> TinyCache:
    """ABCD in block 0 and, computed again by one who does not read, in block 1."""
    cache = hash_cache(num_blocks, **settings)
    cache.serve("ABCD")
    cache.serve("ABCD", reads=False)
    assert cache.picture().startswith("ABCD:evictable ABCD:evictable")
    return cache


def test_a_copy_may_go_before_its_descendants_while_another_stays():
    """EFGH continues ABCD in block 0; of the two ABCD, idle block 1 is the older one to go."""
    cache = twice(4)
    cache.serve("ABCDEFGH")
    assert cache.free_queue() == "3 1 2 0"
    cache.admit("stranger", "12345", writes=False)
    assert cache.picture() == "ABCD:evictable 5:private EFGH:evictable 1234:private"
    assert cache.match("ABCDEFGHI").num_tokens == 8


@pytest.mark.parametrize("policy", ["lru", "reuse_hazard"])
def test_the_oldest_block_waits_for_its_descendants_once_it_is_the_only_copy(policy):
    """Block 1 was released first, as one of two copies; without block 0 EFGH goes before it."""
    cache = twice(4, eviction_policy=policy)
    cache.serve("ABCDEFGH")
    pool = cache.manager.pool
    [other] = [entry for entry in pool.entries() if 0 in entry.blocks]
    pool.evict(other, "space", cache.manager.index)
    cache.manager.check()
    cache.admit("stranger", "123456789", writes=False)
    assert cache.picture() == "1234:private ABCD:evictable 9:private 5678:private"


def test_the_source_of_a_copy_is_held_through_the_oldest_ancestors():
    """A match and its copy hold the same ABCD, block 0; block 1 stays as idle as it was."""
    cache = twice(6)
    cache.serve("ABCDEFGH")
    cache.plan("reader", "ABCDEFXY")
    assert cache.picture().startswith("ABCD:held ABCD:evictable EFGH:held")
    assert cache.free_queue().split()[-1] == "1"
    cache.commit()
    assert cache.free_queue().split()[-2:] == ["1", "2"]

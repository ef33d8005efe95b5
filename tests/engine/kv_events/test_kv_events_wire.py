"""The bytes of events, against the msgpack specification and a consumer's own declarations."""

import struct
from array import array

import msgspec
import pytest

from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.engine.loop import kv_events_wire as wire
from ostinato.observe import events
from tests.engine.kv_events import kv_events_consumer as consumer

ONE, TWO, THREE = (BlockDigest(bytes([n]) * 32) for n in (1, 2, 3))


IMAGE = PrefixKey(Identity(), range(2), [ImageSpan(b"\xca\xfe", 1, 1)]).block_key(0, 2).extra
"""What an image adds to a block whose second token it is: 22 bytes."""


def stored(**changes: object) -> events.BlockStored:
    """Two blocks of two tokens behind another one."""
    fields = {
        "digests": (TWO, THREE),
        "parent": ONE,
        "tokens": array("I", [7, 300, 70_000, 2**32 - 1]),
        "block_size": 2,
        "identity": Identity(),
        "extras": (None, None),
    }
    return events.BlockStored(**{**fields, **changes})


def batch(*told: events.Event) -> events.EventBatch:
    """A batch of the second 1.5."""
    return events.EventBatch(9, 1.5, told)


def digest_bytes(digest: bytes) -> bytes:
    """Bin 8: 0xc4, length, bytes."""
    return b"\xc4\x20" + digest


def word(text: str) -> bytes:
    """Fixstr: 0xa0 + length."""
    return bytes([0xA0 + len(text)]) + text.encode()


HEAD = b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x91"
"""An array of three: a double, an array of one event, ..."""

FOOT = b"\xc0"
"""... and no rank."""

TOKENS = b"\x94\x07\xcd\x01\x2c\xce\x00\x01\x11\x70\xce\xff\xff\xff\xff"
"""An array of four: one byte, two bytes, four bytes, four bytes."""


def test_stored_blocks_of_full_attention_byte_by_byte():
    """In arrays, msgspec leaves no default out: the window is nil."""
    assert wire.BatchEncoder("CPU").encode(batch(stored())) == (
        HEAD
        + b"\x9c"  # twelve elements
        + word("BlockStored")
        + b"\x92" + digest_bytes(TWO) + digest_bytes(THREE)
        + digest_bytes(ONE)
        + TOKENS
        + b"\x02"  # block size
        + b"\xc0"  # no lora id
        + word("CPU")
        + b"\xc0"  # no adapter
        + b"\xc0"  # no extra keys
        + b"\x00"  # group
        + word("full_attention")
        + b"\xc0"  # no window
        + FOOT
    )  # fmt: skip


def test_stored_blocks_of_a_window_with_adapter_and_image_byte_by_byte():
    """At the start of a prompt, so that the parent is nil."""
    event = stored(
        parent=None, extras=(None, IMAGE), group=2, identity=Identity(adapter=b"\xab\xcd")
    )
    assert wire.BatchEncoder("GPU", (16, 8)).encode(batch(event)) == (
        HEAD
        + b"\x9c"  # twelve elements
        + word("BlockStored")
        + b"\x92" + digest_bytes(TWO) + digest_bytes(THREE)
        + b"\xc0"  # no parent
        + TOKENS
        + b"\x02"
        + b"\xc0"
        + word("GPU")
        + word("abcd")
        + b"\x92\xc0\x92"  # nothing for the first block, two keys for the second:
        + b"\x92" + word("cafe") + b"\x01"  # the image and its offset, as vLLM has them,
        + b"\xc4\x16" + IMAGE  # and what is hashed
        + b"\x02"
        + word("sliding_window")
        + b"\x08"  # the window of group 2
        + FOOT
    )  # fmt: skip


def test_removed_blocks_byte_by_byte():
    event = events.BlockRemoved((ONE,), Identity(), 1)
    assert wire.BatchEncoder("CPU", (8,)).encode(batch(event)) == (
        HEAD
        + b"\x94" + word("BlockRemoved") + b"\x91" + digest_bytes(ONE) + word("CPU") + b"\x01"
        + FOOT
    )  # fmt: skip


def test_a_cleared_cache_byte_by_byte():
    encoded = wire.BatchEncoder("CPU").encode(batch(events.AllCleared()))
    assert encoded == HEAD + b"\x91" + word("AllBlocksCleared") + FOOT


def test_a_batch_that_was_emptied_is_still_a_batch():
    """Its number is needed, so that numbers have no gaps."""
    assert wire.BatchEncoder("CPU").encode(batch()) == HEAD[:-1] + b"\x90" + FOOT


def test_time_is_counted_from_1970_not_from_the_zero_of_the_cache():
    encoder = wire.BatchEncoder("CPU", zero_s=1_700_000_000.0)
    assert wire.decode(encoder.encode(batch(events.AllCleared()))).ts == 1_700_000_001.5


def test_a_consumer_with_declarations_of_its_own_reads_every_field():
    """Field by field, by the names that vLLM's documentation gives them."""
    told = (
        stored(group=1, extras=(IMAGE, None)),
        events.BlockRemoved((THREE, TWO), Identity(), 1),
        events.AllCleared(),
    )
    read = consumer.DECODER.decode(wire.BatchEncoder("GPU", (5,)).encode(batch(*told)))
    assert read == consumer.KVEventBatch(
        ts=1.5,
        events=[
            consumer.BlockStored(
                block_hashes=[TWO, THREE],
                parent_block_hash=ONE,
                token_ids=[7, 300, 70_000, 2**32 - 1],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[(["cafe", 1], IMAGE), None],
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=5,
            ),
            consumer.BlockRemoved([THREE, TWO], "GPU", 1),
            consumer.AllBlocksCleared(),
        ],
        data_parallel_rank=None,
    )


def test_a_consumer_from_before_groups_reads_what_it_knows():
    """Older declarations end earlier; what follows is not theirs to read."""

    class BlockStored(consumer.KVCacheEvent):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None

    class OldBatch(consumer.EventBatch):
        events: list[BlockStored]

    [event] = msgspec.msgpack.decode(
        wire.BatchEncoder("CPU").encode(batch(stored())), type=OldBatch
    ).events
    assert (event.block_hashes, event.block_size) == ([TWO, THREE], 2)


def test_we_read_what_a_consumer_would_write():
    """Both sides mean the same bytes; defaults that are left out come back."""
    event = consumer.BlockStored([TWO], None, [1, 2], 2, None, "CPU", None)
    [read] = wire.decode(msgspec.msgpack.encode(consumer.KVEventBatch(2.0, [event]))).events
    assert read == wire.BlockStored((TWO,), None, (1, 2), 2, None, "CPU", None)


@pytest.mark.parametrize("nonsense", [b"", b"\x93\x01\x02", HEAD + b"\x91" + word("Unheard")])
def test_what_is_no_batch_is_refused(nonsense: bytes):
    with pytest.raises(msgspec.DecodeError):
        wire.decode(nonsense)


def test_the_salt_of_a_tenant_does_not_travel():
    """Nor what it could be found from: only digests, which it is an input of."""
    identity = Identity(weights=b"fingerprint", tenant=b"salt of a tenant")
    told = (stored(identity=identity), events.BlockRemoved((ONE,), identity))
    encoded = wire.BatchEncoder("CPU").encode(batch(*told))
    assert identity.tenant not in encoded and identity.weights not in encoded

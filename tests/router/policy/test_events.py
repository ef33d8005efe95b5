"""Bytes of the three engines become the same events."""

from typing import Any

import msgspec
import pytest

from ostinato.core.identity import Identity
from ostinato.engine.loop import kv_events_wire
from ostinato.observe import events as ours
from ostinato.observe.events import salt_name
from ostinato.router.policy.events import Cleared, Removed, Stored, UnusableEvents, decode


def read(*events) -> tuple[Any, ...]:
    return decode(3, msgspec.msgpack.encode([1.5, events, None])).events


def test_arrays_of_vllm_and_sglang():
    """SGLang's stop earlier: no medium, adapter or extra keys."""
    vllm = ["BlockStored", [b"h"], b"p", [1, 2], 2, None, "GPU", "law", [["law", b"image"]], 0]
    sglang = ["BlockStored", [-7], None, [1, 2], 2, None]
    assert read(vllm, sglang, ["BlockRemoved", [-7]], ["AllBlocksCleared"]) == (
        Stored((b"h",), b"p", (1, 2), 2, "law", "", (b"image",), "GPU"),
        Stored((-7,), None, (1, 2), 2),
        Removed((-7,)),
        Cleared(),
    )


def test_maps_of_newer_versions():
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5, 6],
        "block_size": 2,
        "cache_salt": "acme",
        "session_id": "unknown field",
    }
    copies = {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [0, 1]}
    assert read(stored, copies, {"type": "Unheard"}) == (
        Stored((1,), None, (5, 6), 2, salt=salt_name(b"acme")),
        Removed((1,)),
    )


def test_the_salt_stands_last_in_the_first_block():
    """As a text; images are pairs or bytes, and the adapter is not an extra."""
    keys = [["law", ["image", 3], "acme"], ["law"]]
    first = ["BlockStored", [1, 2], None, [1, 2], 1, None, "GPU", "law", keys]
    (event,) = read(first)
    assert event.salt == salt_name(b"acme")
    assert event.extras == (msgspec.msgpack.encode(["image", 3]), b"")


def test_our_engine_names_the_salt_of_a_tenant_without_telling_it():
    identity = Identity(tenant=b"acme")
    stored = ours.BlockStored((b"h" * 32,), None, [1, 2], 2, identity)
    behind = ours.BlockStored((b"i" * 32,), b"h" * 32, [3, 4], 2, identity)
    encoded = kv_events_wire.BatchEncoder("CPU").encode(ours.EventBatch(0, 0.0, (stored, behind)))
    first, second = decode(0, encoded).events
    assert (first.salt, second.salt) == (salt_name(b"acme"), "")
    assert b"acme" not in encoded


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [["BlockStored"]]])],
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(UnusableEvents, match="batch 4 is not a batch of KV events"):
        decode(4, payload)


def test_tokens_that_are_no_ids_are_refused():
    with pytest.raises(UnusableEvents, match="must be integers below"):
        read(["BlockStored", [1], None, [[1, 2]], 1, None])
